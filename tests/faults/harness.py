"""Worker processes that can be killed and stopped, and what must be true afterwards."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvferry.bench.processes import Child, ChildError, ChildOrder

ROUNDS = int(os.environ.get("KVFERRY_FAULT_ROUNDS", "1"))
"""Rounds of each scenario: `make faults` runs 20."""

HAND_OFFS = 1000 if ROUNDS > 1 else 300
"""Of which each must be complete when it is said to be."""

ATTEMPTS = 4 * ROUNDS + 12
"""A round that missed its moment does not count; so many may be tried for all of them."""

HAND_OFF_ATTEMPTS = 3
"""Of a hand-off that nobody disturbs."""

ROLES = ("context", "generation")
TRANSFER_SECONDS = 1.5
ADMISSION_SECONDS = 2.0
BLOCKS = 4096
BLOCK_BYTES = 64 << 10
POOL_BLOCKS = BLOCKS + 512
PARTS = 8
LOST = ("PeerLostError", "TransferTimeoutError")
"""What a survivor may report."""

CONFIG = {
    "kv_transfer_timeout_ms": int(TRANSFER_SECONDS * 1000),
    "kv_transfer_admission_timeout_ms": int(ADMISSION_SECONDS * 1000),
    "kv_transfer_poll_interval_ms": 500,
    "kv_transfer_checksum": True,
}


@dataclass(frozen=True)
class Pairing:
    """What both workers of a pair run on, and by which way their bytes go where there are several."""

    runtime: str
    backend: str
    way: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    kept_of_the_dead: int = 0
    """Connections to each dead peer that the library keeps open for ever."""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.runtime, self.backend, self.way)))


NOT_MAPPED = {"kv_transfer_shared_memory": False}
SOCKETS = {"UCX_TLS": "tcp,self"}

PAIRINGS = (
    Pairing("PYTHON", "NIXL"),
    Pairing("CPP", "NIXL", config=NOT_MAPPED),
    Pairing("CPP", "UCX", config=NOT_MAPPED),
    Pairing("CPP", "UCX", "MAPPED"),  # of the CPP runtime, whatever the backend
    Pairing("CPP", "MOONCAKE", config=NOT_MAPPED, kept_of_the_dead=2),
)
"""Every declared pair whose workers are processes of their own; MPI's are one world (``test_mpi_world.py``)."""

OVER_TCP = (
    Pairing("CPP", "UCX", "TCP", NOT_MAPPED, SOCKETS),
    Pairing("CPP", "NIXL", "TCP", NOT_MAPPED, SOCKETS),
    Pairing("PYTHON", "NIXL", "TCP", environ=SOCKETS),
)[: 1 if ROUNDS == 1 else None]
"""Bytes that are in no process but in a socket when a writer dies: for what happens during a write.

MOONCAKE goes over TCP in any case. All three are UCX in the end: one of them is enough where every test is run once.
"""

over_tcp = pytest.mark.parametrize("company", OVER_TCP, indirect=True, ids=str, scope="session")


class Cast:
    """The worker processes of one pair: two that last from test to test, and those that a test ends.

    Args:
        pairings: what the worker of each role runs on.
        settings: a folder for their key, which all of them share.
    """

    def __init__(self, pairings: Mapping[str, Pairing], settings: Path) -> None:
        self._pairings = pairings
        self._settings = {"XDG_CONFIG_HOME": str(settings), "XDG_STATE_HOME": str(settings)}
        self._lasting: dict[str, Child] = {}
        self._passing: list[Child] = []
        self._waiting: dict[str, Child] = {}
        self._requests = count(1)

    def order(
        self, role: str, *, blocks: int = POOL_BLOCKS, block_bytes: int = BLOCK_BYTES, **config: Any
    ) -> ChildOrder:
        """What it takes to start a worker of a role; ``environ`` beside it."""
        pairing = self._pairings[role]
        names = {"backend": pairing.backend, "transceiver_runtime": pairing.runtime}
        settings = {**names, **CONFIG, **pairing.config, **config}
        options = {"role": role, "blocks": blocks, "block_bytes": block_bytes, "config": settings}
        return ChildOrder("kvferry.bench.peer", [json.dumps(options)], f"{role} worker on {pairing}")

    def kept_of_the_dead(self, role: str) -> int:
        """As its pairing says it."""
        return self._pairings[role].kept_of_the_dead

    def environ(self, role: str) -> dict[str, str]:
        """Everybody's, and what sends a pairing's bytes its way."""
        return {**os.environ, **self._settings, **self._pairings[role].environ}

    def start(self, role: str, **options: Any) -> Child:
        """Start a worker that lasts until the test's end at most; ``options`` as ``order`` takes them."""
        worker = (None if options else self._waiting.pop(role, None)) or self._launch(role, **options)
        self._passing.append(worker)
        assert worker.answer(timeout=60)["ready"]
        return worker

    def expect(self, role: str) -> None:
        """Say that another worker of a role will be started soon: it gets ready meanwhile."""
        if role not in self._waiting:
            self._waiting[role] = self._launch(role)

    def _launch(self, role: str, **options: Any) -> Child:
        order = self.order(role, **options)
        return Child(order.module, order.arguments, environ=self.environ(role), name=order.name)

    def lasting(self, role: str) -> Child:
        """The worker of a role that survives: the same in every test, which leaves it as it found it."""
        if role not in self._lasting:
            for each in ROLES:
                if each not in self._lasting:
                    self.expect(each)
            self._lasting[role] = self.start(role)
            self._passing.remove(self._lasting[role])
        return self._lasting[role]

    def next_request(self) -> int:
        return next(self._requests)

    @contextmanager
    def act(self) -> Iterator["Cast"]:
        """One test: at its end its own workers end, and lasting ones that it did not leave whole."""
        try:
            yield self
        finally:
            _close(self._passing)
            for role, worker in list(self._lasting.items()):
                if not _is_whole(worker):
                    _close([self._lasting.pop(role)])

    def close(self) -> None:
        """End all that last, and all that wait for their part."""
        for worker in self._waiting.values():
            worker.signal(signal.SIGKILL)
        _close([*self._lasting.values(), *self._waiting.values()])


def _close(workers: list[Child]) -> None:
    while workers:
        worker = workers.pop()
        with suppress(ProcessLookupError):
            worker.signal(signal.SIGCONT)
        worker.close()


def _is_whole(worker: Child) -> bool:
    with suppress(ChildError):
        statistics = worker.ask("statistics", timeout=5)
        return is_drained(worker) and statistics["free"] == statistics["total"]
    return False


def kill(worker: Child) -> None:
    """SIGKILL, and wait until the process is really gone."""
    worker.signal(signal.SIGKILL)
    worker.process.wait(10)


def until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.001)


def end_of(worker: Child, request: int, *, seconds: float) -> dict[str, Any]:
    """The outcome of a request, which must come within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in worker.ask("wait", at_least=1)["events"]:
            if event["request"] == request:
                return dict(event)
    raise AssertionError(f"no outcome of request {request} within {seconds:g} s: {worker.ask('status')}")


def is_drained(worker: Child) -> bool:
    ledger = worker.ask("status", timeout=5)["ledger"]
    return not ledger["entries"]


def has_no_part(worker: Child, request: int) -> bool:
    """Whether the ledger knows nothing of a request; others may be in quarantine."""
    entries = worker.ask("status", timeout=5)["ledger"]["entries"]
    return not any(entry["request_id"] == request for entry in entries)


def prepare(cast: Cast, context: Child, generation: Child, *, blocks: int = BLOCKS) -> tuple[int, dict[str, Any]]:
    """One request with blocks on both sides: filled here, poisoned there. Returns its id and its parameters."""
    request = cast.next_request()
    context.ask("allocate", request=request, blocks=blocks)
    context.ask("fill", request=request, seed=request)
    generation.ask("allocate", request=request, blocks=blocks)
    generation.ask("poison", request=request)
    return request, context.ask("params", request=request)


def hand_over(cast: Cast, context: Child, generation: Child, *, blocks: int = 64) -> int:
    """A whole hand-off that must succeed and arrive by value; the generation worker keeps its blocks.

    The clocks are short, for those who die. Where a busy machine lets one run out here, the hand-off is tried again.
    """
    late = []
    while len(late) < HAND_OFF_ATTEMPTS:
        request, params = prepare(cast, context, generation, blocks=blocks)
        generation.ask("receive", request=request, **params)
        context.ask("respond", request=request)
        outcomes = [end_of(worker, request, seconds=10) for worker in (generation, context)]
        if outcomes[0]["outcome"] == "completed":
            assert generation.ask("wrong_blocks", request=request, seed=request) == {"wrong": 0, "first": []}
        context.ask("free", request=request)
        if all(outcome["outcome"] == "completed" for outcome in outcomes):
            return request
        assert any(outcome["error"] == "TransferTimeoutError" for outcome in outcomes), outcomes
        until(lambda number=request: has_no_part(generation, number), seconds=10, what="the end of what came late")
        generation.ask("free", request=request)
        late.append(outcomes)
    raise AssertionError(late)


def use_every_block(cast: Cast, context: Child, generation: Child) -> None:
    """Hand over as many blocks as one large request has, in parts that a busy machine moves within the clock."""
    parts = [hand_over(cast, context, generation, blocks=BLOCKS // PARTS) for _ in range(PARTS)]
    for request in parts:
        generation.ask("free", request=request)


def compare_each(cast: Cast, context: Child, generation: Child) -> None:
    """Many small hand-offs, each compared in the very moment in which it is said to be complete."""
    for _ in range(HAND_OFFS):
        request, params = prepare(cast, context, generation, blocks=4)
        generation.ask("receive", request=request, **params)
        context.ask("respond", request=request)
        seen = generation.ask("wait_and_compare", request=request, seed=request)
        assert seen == {"completed": [request], "wrong": 0}
        assert end_of(context, request, seconds=5)["outcome"] == "completed"
        for worker in (context, generation):
            worker.ask("free", request=request)


def survives(cast: Cast, survivor: Child, context: Child, generation: Child) -> None:
    """One of the two, which lost a peer, keeps serving; its ledger drains, and no block is missing."""
    until(lambda: is_drained(survivor), seconds=10, what="an empty ledger")
    generation.ask("free", request=hand_over(cast, context, generation))
    until(lambda: is_drained(survivor), seconds=5, what="an empty ledger")
    statistics = survivor.ask("statistics")
    assert statistics["free"] == statistics["total"]


def session_of(context: Child, request: int) -> dict[str, Any] | None:
    """What a context worker says of a request that is not over."""
    sessions = context.ask("status")["sends"]
    return next((dict(session) for session in sessions if session["request_id"] == request), None)


def is_partial(context: Child, request: int) -> bool:
    """Whether some but not all bytes of a request are known to be complete."""
    session = session_of(context, request)
    return session is not None and 0 < session["bytes_done"] < session["bytes_expected"]


def wait_for_partial(context: Child, request: int) -> bool:
    """Wait until some but not all bytes of a request are complete; False if it ended without being seen so."""
    until(lambda: session_of(context, request) is not None, seconds=10, what="a session")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        session = session_of(context, request)
        if session is None:
            return False
        if 0 < session["bytes_done"] < session["bytes_expected"]:
            return True
    raise AssertionError(f"request {request} never began: {context.ask('status')}")
