"""Ranks as processes of their own, which a harness opens, drives, and may kill: real managers over real agents.

They are forked from one process that has imported what takes long, and has loaded no transport.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.testing.token_pattern import (
    Bytes,
    TokenRange,
    pool_memory,
    write_pattern,
    wrong_bytes,
)
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import DisaggregatedParams, ModelGeometry, RankSpec, Role, TransferRequest

_PRELOADED = (
    "torch",
    "kvferry.cache.manager_v1",
    "kvferry.cache.manager_v2",
    "kvferry.dispatcher",
    "kvferry.transceiver.native_runtime",
    "kvferry.transceiver.python_runtime",
    "kvferry.testing.files_as_loaded",
    __name__,
)

ANSWER_SECONDS = 120.0
"""How long a command may take on a machine under load."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """What a rank is to be; ``settings`` is an engine configuration."""

    role: Role
    ranks: RankSpec
    geometry: ModelGeometry
    settings: Mapping[str, Any]
    model: Mapping[str, str] = field(
        default_factory=lambda: {"architecture": "FakeForCausalLM", "config": "c0", "weights": "w0"}
    )
    path: tuple[str, ...] = ()
    """Folders that come first on the path, so that what is installed there is found."""
    locked: bool = False


class RankError(KvferryError):
    """A rank's process answered with an error, or not at all."""


class RankProcess:
    """One process, in which ranks can be opened one after the other.

    Args:
        environ: what is added to its environment.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(environ)), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def tell(self, command: str, **arguments: Any) -> None:
        """Send a command; its answer is still to be read."""
        self._connection.send((command, arguments))

    def answer(self, seconds: float = ANSWER_SECONDS) -> Any:
        """Wait for the next answer. Raises RankError."""
        if not self._connection.poll(seconds):
            raise RankError(f"process {self._process.pid} did not answer within {seconds:g} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RankError(f"process {self._process.pid} is gone") from None
        if isinstance(answer, _Problem):
            raise RankError(answer.text)
        return answer

    def ask(self, command: str, **arguments: Any) -> Any:
        """Send a command and wait for its answer. Raises RankError."""
        self.tell(command, **arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process, by its id."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.signal(signal.SIGKILL)
        self._process.join(30)

    def close(self) -> None:
        """End the process, by SIGKILL if its end of the pipe does not help."""
        self._connection.close()
        self._process.join(20)
        if self._process.is_alive():
            self.kill()
        self._process.close()


@dataclass(frozen=True, slots=True)
class _Problem:
    text: str


class _Rank:
    """What runs in the process: each method is a command."""

    def __init__(self) -> None:
        self._order: RankOrder | None = None
        self._parts: Any = None
        self._requests: dict[int, TransferRequest] = {}
        self._before: list[Bytes] = []
        self._path = list(sys.path)

    def open(self, order: RankOrder) -> str:
        """Become a rank; the answer comes when all ranks have joined."""
        from kvferry.dispatcher import build, resolve
        from kvferry.registry.load import load_registry
        from kvferry.registry.toggles import Toggles

        sys.path[:] = [*order.path, *self._path]
        registry = load_registry(toggles=Toggles())
        plan = resolve(order.settings, model=None, registry=registry, environ={})
        self._parts = build(
            plan,
            registry=registry,
            role=order.role,
            geometry=order.geometry,
            model_identity=order.model,
            ranks=order.ranks,
            locked=order.locked,
        )
        self._order = order
        for pool in pool_memory(self._layout):  # nothing in it looks like a hand-off
            pool[:] = np.random.default_rng(order.ranks.rank).integers(0, 256, len(pool), dtype=np.uint8)
        return str(self._transceiver.status_dump()["endpoint"])

    def close(self) -> None:
        """Be no rank any more."""
        if self._parts is not None:
            self._before = []
            self._parts.shutdown()
            self._parts = None
            self._requests.clear()

    @property
    def _transceiver(self) -> KvCacheTransceiver:
        transceiver: KvCacheTransceiver = self._parts.transceiver
        return transceiver

    @property
    def _layout(self) -> Any:
        return self._parts.manager.layout

    def prefill(self, request_id: int, prompt: tuple[int, ...], chunks: Sequence[int], send: bool = True) -> None:
        """Compute a prompt chunk by chunk, as an engine does, and send each; ``chunks`` are ends in tokens."""
        manager = self._parts.manager
        if request_id not in self._requests:
            manager.allocate(request_id, len(prompt), prompt, max_cached_tokens=len(prompt) - 1)
            self._requests[request_id] = TransferRequest(request_id, prompt, aux=b"from here")
            self._transceiver.prepare_context_requests([self._requests[request_id]])
        for end in chunks:
            manager.extend(request_id, end)
            tables = manager.block_table(request_id)
            write_pattern(self._layout, pool_memory(self._layout), tables, TokenRange(0, end), request_id)
            if send:
                last = end == len(prompt)
                self._transceiver.respond_and_send_async(self._requests[request_id], end, last)
            manager.advance(request_id, end)

    def params(self, request_id: int) -> DisaggregatedParams:
        """What a generation worker needs."""
        return self._transceiver.get_disaggregated_params(self._requests[request_id])

    def allocate(self, request_id: int, prompt: tuple[int, ...]) -> int:
        """Generation: give a prompt blocks; returns the tokens that are there."""
        cached: int = self._parts.manager.allocate(request_id, len(prompt) + 1, prompt, history_tokens=len(prompt))
        self._requests[request_id] = TransferRequest(request_id, prompt, cached_tokens=cached)
        return cached

    def receive(self, request_id: int, params: DisaggregatedParams) -> None:
        """Generation: note what memory holds, and fetch."""
        self._before = [pool.copy() for pool in pool_memory(self._layout)]
        self._requests[request_id] = replace(self._requests[request_id], params=params)
        self._transceiver.request_and_receive_async(self._requests[request_id])

    def wrong_bytes(self, request_id: int, seed: int) -> int:
        """Generation: bytes that are not what they should be after the last ``receive``."""
        request, tables = self._requests[request_id], self._parts.manager.block_table(request_id)
        tokens = TokenRange(request.cached_tokens, len(request.prompt_token_ids))
        memory = pool_memory(self._layout)
        return wrong_bytes(self._layout, memory, self._before, tables, tokens, seed, slid_may_lack=True)

    def end(self, seconds: float = 60.0) -> dict[str, Any] | None:
        """Wait for an outcome; None when the time is over."""
        assert self._order is not None
        transceiver, is_context = self._transceiver, self._order.role is Role.CONTEXT
        check = transceiver.check_context_transfer_status if is_context else transceiver.check_gen_transfer_status
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event in check(1).events:
                error = type(event.error).__name__ if event.error is not None else ""
                message = str(event.error or "")
                return {"outcome": event.outcome, "error": error, "message": message, "aux": event.aux}
        return None

    def cancel(self, request_id: int) -> bool:
        """Cancel a request."""
        return self._transceiver.cancel_request(self._requests[request_id])

    def free(self, request_id: int) -> None:
        """Give a request's blocks back."""
        del self._requests[request_id]
        self._parts.manager.free(request_id)

    def status(self) -> dict[str, object]:
        """The transceiver's own words."""
        return self._transceiver.status_dump()

    def in_use(self) -> int:
        """Blocks that somebody has, over all groups."""
        manager = self._parts.manager
        return sum(manager.statistics(group).in_use for group in range(len(self._layout.groups)))


def _serve(connection: Connection, environ: Mapping[str, str]) -> None:
    """Answer commands until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environ)
    rank = _Rank()
    while True:
        try:
            command, arguments = connection.recv()
        except (EOFError, OSError):
            rank.close()
            return
        try:
            answer = getattr(rank, command)(**arguments)
        except Exception as error:
            detail = "" if isinstance(error, KvferryError) else f"\n{traceback.format_exc()}"
            answer = _Problem(f"{type(error).__name__}: {error}{detail}")
        connection.send(answer)
