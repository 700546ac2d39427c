"""A process with a pair of workers that is forked while they work; prints what came of it as JSON.

Arguments: backend (``SCRIPTED`` or a real one), runtime.
"""

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvferry.dispatcher import WorkerParts, build, resolve
from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.errors import ForkedProcessError
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.types import ModelGeometry, Role, RuntimeSupport, TransferBackend, TransferRequest

GEOMETRY = ModelGeometry(2, 2, 16, "float32", (None, None))
IDENTITY = {"architecture": "Fake", "config": "c", "weights": "w"}
PROMPT = tuple(range(100))
SECONDS = 60.0
"""Deadline of a child; one that hangs is ended and said to have hung."""


class ScriptedBackend:
    name = "scripted"
    hub = ScriptedHub()

    @hookimpl
    def transfer_backends(self):
        return (TransferBackend("SCRIPTED", {"PYTHON": RuntimeSupport()}, "kvferry_plugins.testing:none"),)

    @hookimpl
    def create_transfer_agent(self, spec):
        return ScriptedAgent(spec.name, hub=self.hub)


class Messages(logging.Handler):
    """Keeps what the log says of forks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "forked" in record.getMessage():
            self.texts.append(record.getMessage())


class Pair:
    """Both sides in this process."""

    def __init__(self, backend: str, runtime: str, stack: ExitStack) -> None:
        self.registry = isolated_registry(*([ScriptedBackend()] if backend == "SCRIPTED" else []))
        written = {
            "cache_transceiver_config": {"backend": backend, "transceiver_runtime": runtime},
            "kv_cache_config": {"max_tokens": 4096, "tokens_per_block": 8},
            "device": "cpu",
        }
        self.plan = resolve(written, model=None, registry=self.registry, environ={})
        self.parts = {role: self.build(role) for role in Role}
        for parts in self.parts.values():
            stack.callback(parts.shutdown)
        self.agents = {role: parts.transceiver._shared.agent for role, parts in self.parts.items()}
        self.request = 0

    def build(self, role: Role) -> WorkerParts:
        return build(self.plan, registry=self.registry, role=role, geometry=GEOMETRY, model_identity=IDENTITY)

    def begin(self) -> tuple[int, TransferRequest]:
        """Start a hand-off; its number, and the generation side's request."""
        context, generation = self.parts[Role.CONTEXT], self.parts[Role.GENERATION]
        self.request += 1
        number, prompt = self.request, tuple(token + self.request * 1000 for token in PROMPT)
        context.manager.allocate(number, len(prompt), prompt)
        request = TransferRequest(number, prompt)
        context.transceiver.prepare_context_requests([request])
        generation.manager.allocate(number, len(prompt) + 1, prompt)
        params = context.transceiver.get_disaggregated_params(request)
        return number, TransferRequest(number, prompt, params=params)

    def hand_over(self) -> None:
        _, request = self.begin()
        self.finish(request)

    def finish(self, request: TransferRequest) -> None:
        context, generation = self.parts[Role.CONTEXT], self.parts[Role.GENERATION]
        context.transceiver.respond_and_send_async(TransferRequest(request.request_id, request.prompt_token_ids))
        generation.transceiver.request_and_receive_sync(request)


def refusals(pair: Pair) -> dict[str, Any]:
    """Use everything in a child: method → the error it raises, or what it did instead."""
    found: dict[str, Any] = {}
    request = TransferRequest(1, PROMPT)
    transceiver, agent = pair.parts[Role.CONTEXT].transceiver, pair.agents[Role.CONTEXT]
    calls: dict[str, Callable[[], Any]] = {
        "status_dump": lambda: transceiver.status_dump(),
        "prepare_context_requests": lambda: transceiver.prepare_context_requests([request]),
        "respond_and_send_async": lambda: transceiver.respond_and_send_async(request),
        "request_and_receive_async": lambda: transceiver.request_and_receive_async(request),
        "request_and_receive_sync": lambda: transceiver.request_and_receive_sync(request),
        "check_context_transfer_status": lambda: transceiver.check_context_transfer_status(1),
        "check_gen_transfer_status": lambda: transceiver.check_gen_transfer_status(1),
        "check_gen_transfer_complete": lambda: transceiver.check_gen_transfer_complete(),
        "has_inflight_transfer": lambda: transceiver.has_inflight_transfer(request),
        "cancel_request": lambda: transceiver.cancel_request(request),
        "commit_blocks_for_reuse": lambda: transceiver.commit_blocks_for_reuse(request),
        "get_disaggregated_params": lambda: transceiver.get_disaggregated_params(request),
        "stalled": lambda: transceiver.stalled(1.0),
        "agent.register": lambda: agent.register([]),
        "agent.deregister": lambda: agent.deregister(1),
        "agent.local_descriptor": lambda: agent.local_descriptor(),
        "agent.connect": lambda: agent.connect(b""),
        "agent.disconnect": lambda: agent.disconnect(1),
        "agent.submit": lambda: agent.submit(1, None, None, None),
        "agent.poll": lambda: agent.poll(),
        "agent.route": lambda: agent.route(1),
        "agent.set_active": lambda: agent.set_active(True),
        "agent.wakeup_fd": lambda: agent.wakeup_fd(),
        "agent.fence": lambda: agent.fence(1),
        "build": lambda: pair.build(Role.CONTEXT),
    }
    for name, call in calls.items():
        try:
            found[name] = f"returned {call()!r}"
        except ForkedProcessError as error:
            found[name] = [str(error), error.parent, error.runtime, error.backend, error.plugin, error.distribution]
        except BaseException as error:
            found[name] = f"raised {error!r}"
    return found


def forked(act: Callable[[], Any], *, exits: str) -> dict[str, Any]:
    """Fork; the child acts and ends, the parent waits for it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            json.dump(act(), pipe)
        if exits == "sys.exit":
            sys.exit(7)
        os._exit(7)
    os.close(writing)
    return {**awaited(pid), "said": read_all(reading)}


def read_all(descriptor: int) -> Any:
    with os.fdopen(descriptor) as pipe:
        text = pipe.read()
    return json.loads(text) if text else None


def awaited(pid: int) -> dict[str, Any]:
    """A child's end; one that does not come is a hang, and is ended."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return {"hung": False, "status": os.waitstatus_to_exitcode(status)}
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return {"hung": True, "status": None}


def use_and_end(pair: Pair) -> dict[str, Any]:
    """What a child may try: everything, then a tidy end."""
    found = refusals(pair)
    for parts in pair.parts.values():
        parts.transceiver.shutdown()
        parts.shutdown()
    for agent in pair.agents.values():
        agent.close()
    return found


def in_multiprocessing(pair: Pair) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=lambda: answers.put(use_and_end(pair)))
    process.start()
    process.join(SECONDS)
    hung = process.is_alive()
    if hung:
        process.kill()
    return {"hung": hung, "status": process.exitcode, "said": None if hung else answers.get()}


def other_processes() -> dict[str, Any]:
    """What subprocess and spawn start beside the workers."""
    plain = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, check=True)
    prepared = subprocess.run(
        [sys.executable, "-c", "print(2)"], capture_output=True, text=True, check=True, preexec_fn=os.getpid
    )
    process = multiprocessing.get_context("spawn").Process(target=print, args=("",))
    process.start()
    process.join(SECONDS)
    return {"plain": plain.stdout, "prepared": prepared.stdout, "spawned": process.exitcode}


def main(backend: str, runtime: str) -> None:
    messages = Messages()
    logging.getLogger("kvferry").addHandler(messages)
    with ExitStack() as stack:
        pair = Pair(backend, runtime, stack)
        pair.hand_over()
        others = other_processes()
        before = list(messages.texts)
        _, under_way = pair.begin()
        result = {
            "pid": os.getpid(),
            "others": others,
            "messages_before": before,
            "fork": forked(lambda: use_and_end(pair), exits="sys.exit"),
            "multiprocessing": in_multiprocessing(pair),
        }
        pair.finish(under_way)
        for _ in range(3):
            pair.hand_over()
        forked(lambda: None, exits="os._exit")
        result["messages"] = messages.texts
        result["requests"] = pair.request
        result["drained"] = [parts.transceiver.drained for parts in pair.parts.values()]
    result["after"] = forked(lambda: refused(pair), exits="os._exit")
    result["messages_after"] = messages.texts[1:]
    result["grandchild"] = forked(lambda: forked(lambda: refused(pair), exits="sys.exit"), exits="sys.exit")
    print(json.dumps(result))


def refused(pair: Pair) -> list[Any] | None:
    """What ``build`` raises in a child of a process whose workers are shut down."""
    try:
        pair.build(Role.CONTEXT)
    except ForkedProcessError as error:
        return [str(error), error.parent]
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
