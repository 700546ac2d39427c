"""Worker processes that can be killed and stopped, and what must be true afterwards."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.processes import Child

ROUNDS = int(os.environ.get("KVFERRY_FAULT_ROUNDS", "1"))
"""Rounds of each scenario: `make faults` runs 20."""

ATTEMPTS = 4 * ROUNDS + 12
"""A round that missed its moment does not count; so many may be tried for all of them."""

TRANSFER_SECONDS = 1.5
ADMISSION_SECONDS = 2.0
BLOCKS = 4096
BLOCK_BYTES = 64 << 10
LOST = ("PeerLostError", "TransferTimeoutError")
"""What a survivor may report."""

CONFIG = {
    "backend": "NIXL",
    "transceiver_runtime": "PYTHON",
    "kv_transfer_timeout_ms": int(TRANSFER_SECONDS * 1000),
    "kv_transfer_admission_timeout_ms": int(ADMISSION_SECONDS * 1000),
    "kv_transfer_poll_interval_ms": 500,
    "kv_transfer_checksum": True,
}


@dataclass
class Cast:
    """Worker processes of one test, all ended with it; those of one role are alike."""

    stack: ExitStack
    requests: int = 0
    pools: dict[int, int] = field(default_factory=dict)

    def start(self, role: str, *, blocks: int = BLOCKS + 512, **config: Any) -> Child:
        options = {"role": role, "blocks": blocks, "block_bytes": BLOCK_BYTES, "config": {**CONFIG, **config}}
        worker = Child("kvferry.bench.peer", [json.dumps(options)], name=f"{role} worker")
        self.stack.callback(worker.close)
        assert worker.answer(timeout=60)["ready"]
        return worker

    def next_request(self) -> int:
        self.requests += 1
        return self.requests


def kill(worker: Child) -> None:
    """SIGKILL, and wait until the process is really gone."""
    worker.signal(signal.SIGKILL)
    worker.process.wait(10)


def until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)


def end_of(worker: Child, request: int, *, seconds: float) -> dict[str, Any]:
    """The outcome of a request, which must come within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in worker.ask("wait", at_least=1)["events"]:
            if event["request"] == request:
                return dict(event)
    raise AssertionError(f"no outcome of request {request} within {seconds:g} s: {worker.ask('status')}")


def is_drained(worker: Child) -> bool:
    ledger = worker.ask("status")["ledger"]
    return not ledger["entries"]


def prepare(cast: Cast, context: Child, generation: Child, *, blocks: int = BLOCKS) -> tuple[int, dict[str, Any]]:
    """One request with blocks on both sides: filled here, poisoned there. Returns its id and its parameters."""
    request = cast.next_request()
    context.ask("allocate", request=request, blocks=blocks)
    context.ask("fill", request=request, seed=request)
    generation.ask("allocate", request=request, blocks=blocks)
    generation.ask("poison", request=request)
    return request, context.ask("params", request=request)


def hand_over(cast: Cast, context: Child, generation: Child, *, blocks: int = 64) -> int:
    """A whole hand-off that must succeed and arrive by value; the generation worker keeps its blocks."""
    request, params = prepare(cast, context, generation, blocks=blocks)
    generation.ask("receive", request=request, **params)
    context.ask("respond", request=request)
    outcome = end_of(generation, request, seconds=10)
    assert outcome["outcome"] == "completed", outcome
    assert generation.ask("wrong_blocks", request=request, seed=request) == {"wrong": 0, "first": []}
    assert end_of(context, request, seconds=10)["outcome"] == "completed"
    context.ask("free", request=request)
    return request


def survives(cast: Cast, survivor: Child, context: Child, generation: Child, *, free_before: int) -> None:
    """One of the two, which lost a peer, keeps serving; its ledger drains, and no block is missing."""
    until(lambda: is_drained(survivor), seconds=10, what="an empty ledger")
    generation.ask("free", request=hand_over(cast, context, generation))
    until(lambda: is_drained(survivor), seconds=5, what="an empty ledger")
    assert survivor.ask("statistics")["free"] == free_before


def wait_for_partial(context: Child, request: int) -> bool:
    """Wait until some but not all pieces of a request are complete; False if it ended without being seen so."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        sessions = {session["request_id"]: session for session in context.ask("status")["sends"]}
        session = sessions.get(request)
        if session is None:
            return False
        if 0 < session["bytes_done"] < session["bytes_expected"]:
            return True
    raise AssertionError(f"request {request} never began: {context.ask('status')}")
