"""One side of a measured or tormented pair: a real manager and transceiver in a process, driven by lines of JSON.

Run as ``python -m kvferry.bench.peer '{"role": "context", …}'``.
"""

import base64
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

import msgspec
import numpy as np

from kvferry.bench import patterns
from kvferry.bench.spinner import Spinner
from kvferry.bench.timed_agent import TimedAgent, TimedBlockAgent, timed
from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.dispatcher import agent_maker, resolve, wants_shared_pools
from kvferry.registry.door import Registry
from kvferry.registry.inheritance import inheritance_of
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Toggles
from kvferry.transceiver.mapping import share
from kvferry.transceiver.memory_in_use import shut_down_manager
from kvferry.transceiver.pieces import pieces_of
from kvferry_plugins.layout import BlockIds
from kvferry_plugins.transceiver import KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import (
    AgentSpec,
    DisaggregatedParams,
    ManagerSpec,
    ModelGeometry,
    Plan,
    Role,
    TransceiverSpec,
    TransferEvent,
    TransferRequest,
    TransferStatus,
)

TOKENS_PER_BLOCK = 16
_ITEM_BYTES = 2
_BYTES_A_DIM = 2 * TOKENS_PER_BLOCK * _ITEM_BYTES
"""Of one layer with one head: key and value."""


class BenchManager(KVCacheManagerV1):
    """Manager V1 whose tables can be shuffled, as after long service, and shared by several requests."""

    permutation_seed: int | None = None
    """Of the order that every table gets; None = as allocated."""

    def __init__(self, spec: ManagerSpec) -> None:
        super().__init__(spec)
        self.shared: dict[int, int] = {}
        """Request → the one whose blocks it has."""

    def block_table(self, request_id: int) -> tuple[BlockIds, ...]:
        """The request's blocks."""
        tables = super().block_table(self.shared.get(request_id, request_id))
        if self.permutation_seed is None:
            return tables
        return tuple(np.random.default_rng(self.permutation_seed).permutation(table) for table in tables)


def _manager_spec(options: Mapping[str, Any], *, shared: bool) -> ManagerSpec:
    return ManagerSpec(
        kind="V1",
        geometry=ModelGeometry(1, 1, options["block_bytes"] // _BYTES_A_DIM, "float16", (None,)),
        tokens_per_block=TOKENS_PER_BLOCK,
        max_tokens=options["blocks"] * TOKENS_PER_BLOCK,
        free_memory_fraction=0.5,
        enable_block_reuse=bool(options.get("reuse", False)),
        device="cpu",
        shared=shared,
    )


class PeerProcess:
    """The commands that a pair is driven by; each returns what is printed as JSON."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.role = Role(options["role"])
        registry = load_registry(toggles=Toggles())
        inheritance = inheritance_of(registry, os.environ)
        self.parent = inheritance.dump() if inheritance is not None else None
        """How our plugins compare with those of the process that started us."""
        plan = resolve({"cache_transceiver_config": options["config"]}, model=None, registry=registry, environ={})
        self.manager = BenchManager(_manager_spec(options, shared=wants_shared_pools(plan, registry)))
        self.pool = self.manager.layout.pools[0]
        self.agent: TimedAgent | None = None
        self.spinner = Spinner()
        self.requests: dict[int, TransferRequest] = {}
        self.transceiver = self._make_transceiver(options, plan, registry)

    def _make_transceiver(self, options: Mapping[str, Any], plan: Plan, registry: Registry) -> KvCacheTransceiver:
        make_agent = agent_maker(plan, registry)

        def make_timed_agent(spec: AgentSpec) -> TransferAgent:
            self.agent = timed(make_agent(spec))
            return self.agent

        assert plan.runtime is not None
        assert plan.backend is not None
        assert plan.providers.runtime is not None
        return registry.create_transceiver(
            plan.providers.runtime,
            TransceiverSpec(
                role=self.role,
                runtime=plan.runtime,
                backend=plan.backend,
                manager=self.manager,
                create_agent=make_timed_agent,
                model=options.get("model", {"architecture": "bench", "config": "bench", "weights": "bench"}),
                config=plan.effective["cache_transceiver_config"],
            ),
        )

    # --- blocks --------------------------------------------------------------------------------------------------

    def allocate(self, request: int, blocks: int, prompt_seed: int | None = None) -> dict[str, Any]:
        """Give a request its blocks; the prompt's tokens are drawn from ``prompt_seed`` (default: the request)."""
        seed = request if prompt_seed is None else prompt_seed
        prompt = tuple(range(seed << 24, (seed << 24) + blocks * TOKENS_PER_BLOCK))
        cached = self.manager.allocate(request, len(prompt), prompt)
        self.requests[request] = TransferRequest(request, prompt, cached_tokens=cached)
        return {"cached_tokens": cached, "first_block": int(self.manager.block_table(request)[0][0])}

    def share(self, request: int, of: int) -> dict[str, Any]:
        """Give a request the prompt and the blocks of another one, which keeps them."""
        self.manager.shared[request] = of
        self.requests[request] = replace(self.requests[of], request_id=request)
        return {}

    def permute(self, seed: int | None) -> dict[str, Any]:
        """Shuffle every table from now on; None = no more."""
        self.manager.permutation_seed = seed
        return {}

    def fill(self, request: int, seed: int) -> dict[str, Any]:
        """Write a pattern to a request's blocks."""
        patterns.fill(self.pool, self.manager.block_table(request)[0], seed)
        return {}

    def poison(self, request: int) -> dict[str, Any]:
        """Spoil a request's blocks."""
        patterns.poison(self.pool, self.manager.block_table(request)[0])
        return {}

    def wrong_blocks(self, request: int, seed: int) -> dict[str, Any]:
        """Count the blocks of a request that do not hold the pattern of ``seed``."""
        wrong = patterns.wrong_blocks(self.pool, self.manager.block_table(request)[0], seed)
        return {"wrong": len(wrong), "first": wrong[:5]}

    def free(self, request: int) -> dict[str, Any]:
        """Give a request's blocks back."""
        del self.requests[request]
        if self.manager.shared.pop(request, None) is None:
            self.manager.free(request)
        return {}

    def statistics(self) -> dict[str, Any]:
        """Count the manager's blocks."""
        figures = self.manager.statistics()
        return {"total": figures.total, "free": figures.free, "cached": figures.cached, "in_use": figures.in_use}

    # --- transfers -----------------------------------------------------------------------------------------------

    def params(self, request: int) -> dict[str, Any]:
        """What the generation worker needs."""
        params = self.transceiver.get_disaggregated_params(self.requests[request])
        return {"params": base64.b64encode(msgspec.msgpack.encode(params)).decode()}

    def respond(self, request: int) -> dict[str, Any]:
        """Send a request's KV."""
        begun = time.monotonic()
        self.transceiver.respond_and_send_async(self.requests[request])
        return {"begun": begun}

    def introduce(self, request: int, params: str) -> dict[str, Any]:
        """Learn where a request's KV is to be fetched from."""
        decoded = msgspec.msgpack.decode(base64.b64decode(params), type=DisaggregatedParams)
        self.requests[request] = replace(self.requests[request], params=decoded)
        return {}

    def receive(self, request: int, params: str) -> dict[str, Any]:
        """Fetch a request's KV."""
        self.introduce(request, params)
        begun = time.monotonic()
        self.transceiver.request_and_receive_async(self.requests[request])
        return {"begun": begun}

    def wait(self, at_least: int = 1) -> dict[str, Any]:
        """Outcomes since the last call, with the moment at which they were known."""
        status = self._check(at_least)
        now = time.monotonic()
        return {"at": now, "events": [_as_json(event) for event in status.events]}

    def stream(self, requests: Sequence[int], window: int) -> dict[str, Any]:
        """Send or fetch many requests' KV, so many in flight at a time, with no command in between."""
        waiting, events = deque(self.requests[request] for request in requests), list[TransferEvent]()
        begun = time.monotonic()
        while len(events) < len(requests):
            while waiting and len(requests) - len(waiting) - len(events) < window:
                self._start(waiting.popleft())
            events += self._check(1).events
        return {"begun": begun, "at": time.monotonic(), "events": [_as_json(event) for event in events]}

    def _start(self, request: TransferRequest) -> None:
        if self.role is Role.CONTEXT:
            self.transceiver.respond_and_send_async(request)
        else:
            self.transceiver.request_and_receive_async(request)

    def _check(self, at_least: int) -> TransferStatus:
        if self.role is Role.CONTEXT:
            return self.transceiver.check_context_transfer_status(at_least)
        return self.transceiver.check_gen_transfer_status(at_least)

    def wait_and_compare(self, request: int, seed: int) -> dict[str, Any]:
        """Wait for one outcome and compare the request's blocks at once, with nothing in between."""
        status = self.transceiver.check_gen_transfer_status(1)
        wrong = patterns.wrong_blocks(self.pool, self.manager.block_table(request)[0], seed)
        return {"completed": list(status.completed), "wrong": len(wrong)}

    def cancel(self, request: int) -> dict[str, Any]:
        """Cancel a request."""
        return {"free_now": self.transceiver.cancel_request(self.requests[request])}

    def status(self) -> dict[str, Any]:
        """The transceiver's own words."""
        return dict(self.transceiver.status_dump())

    def parts(self) -> dict[str, Any]:
        """Seconds of the agent's calls since the last ask: posting, and from the first post to the last completion."""
        return self.agent.take_figures() if self.agent is not None else {}

    def planning_seconds(self, request: int) -> dict[str, Any]:
        """How long it takes to plan a request's segments and cut them into pieces (onto its own table).

        None where the agent plans by itself, in its own threads.
        """
        if isinstance(self.agent, TimedBlockAgent):
            return {"seconds": None}
        layout, tables = self.manager.layout, self.manager.block_table(request)
        overlap, tokens = share([layout], [layout])[0, 0], len(tables[0]) * TOKENS_PER_BLOCK
        begun = time.monotonic()
        pieces = list(pieces_of(overlap.copies(tables, tables, tokens, 0, 0, tokens)))
        seconds = time.monotonic() - begun
        return {"seconds": seconds, "pieces": len(pieces), "segments": sum(len(piece.src) for piece in pieces)}

    def cpu_seconds(self) -> dict[str, Any]:
        """CPU time of this process so far, and the clock."""
        times = os.times()
        return {"cpu": times.user + times.system, "at": time.monotonic()}

    def spin(self, on: bool, locked: bool) -> dict[str, Any]:
        """Let a thread of this process spin, or rest; see ``Spinner``."""
        self.spinner.turn(on, locked=locked)
        return {}

    def shutdown(self) -> None:
        """End the transceiver, then the manager."""
        self.transceiver.shutdown()
        shut_down_manager(self.manager, self.transceiver)


def _as_json(event: TransferEvent) -> dict[str, Any]:
    return {
        "request": event.request_id,
        "outcome": event.outcome,
        "nbytes": event.nbytes,
        "error": type(event.error).__name__ if event.error is not None else None,
        "message": str(event.error) if event.error is not None else None,
        "transfer_seconds": event.transfer_seconds,
    }


def main() -> None:
    """Answer commands until the input ends."""
    answers = _take_stdout()
    peer = PeerProcess(json.loads(sys.argv[1]))
    _say(answers, {"ready": True, "pid": os.getpid(), "parent": peer.parent})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(peer, command.pop("command"))(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say(answers, answer)
    peer.shutdown()


def _take_stdout() -> TextIO:
    """Keep stdout for answers alone: what a native library prints there goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, answer: Mapping[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
