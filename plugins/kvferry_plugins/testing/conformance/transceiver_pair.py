"""A context and a generation worker of the transceivers under test, in one process."""

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.transceiver import KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import Role, TransferEvent, TransferRequest, TransferStatus

PROMPT = tuple(range(100, 130))
"""Eight blocks of four tokens, the last one half full."""


@dataclass(slots=True)
class Worker:
    """One side."""

    role: Role
    manager: KVCacheManager
    transceiver: KvCacheTransceiver
    agent: TransferAgent
    told: Counter[int] = field(default_factory=Counter)
    """Request → how often a status listed it."""
    events: dict[int, TransferEvent] = field(default_factory=dict)
    requests: set[int] = field(default_factory=set)
    """What has blocks."""

    def listen(self, at_least: int = 0) -> None:
        """Ask for outcomes, and keep them."""
        status = self.ask(at_least)
        listed = (*status.completed, *status.failed, *status.cancelled)
        assert sorted(listed) == sorted(event.request_id for event in status.events), (
            f"the {self.role} status lists requests {listed} and has events of "
            f"{[event.request_id for event in status.events]}"
        )
        for event in status.events:
            assert event.request_id in getattr(status, event.outcome), (
                f"request {event.request_id} {event.outcome}, and the {self.role} status does not list it there"
            )
            self.events.setdefault(event.request_id, event)
        self.told.update(listed)

    def ask(self, at_least: int = 0) -> TransferStatus:
        """The status that is this side's."""
        asked = self.transceiver
        if self.role is Role.CONTEXT:
            return asked.check_context_transfer_status(at_least)
        return asked.check_gen_transfer_status(at_least)

    def fill(self, request_id: int, seed: int) -> None:
        """Write random bytes to a request's blocks, as a prefill would."""
        random = np.random.default_rng(seed)
        for address, nbytes in self._rows(request_id):
            ctypes.memmove(address, random.bytes(nbytes), nbytes)

    def tokens(self, request_id: int, count: int) -> bytes:
        """The KV of a request's first tokens, token by token."""
        return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in self._rows(request_id, count))

    def others(self, request_id: int) -> bytes:
        """The bytes of all blocks that the request has not."""
        layout, found = self.manager.layout, []
        for group, table in zip(layout.groups, self.manager.block_table(request_id), strict=True):
            mine = set(table.tolist())
            for pool in (layout.pools[number] for number in group.pools):
                for block in sorted(set(range(pool.num_blocks)) - mine):
                    found.append(ctypes.string_at(pool.base + block * pool.block_stride, pool.block_stride))
        return b"".join(found)

    def in_use(self) -> int:
        """Blocks that a request or a hold has."""
        return sum(self.manager.statistics(group).in_use for group in range(len(self.manager.layout.groups)))

    def _rows(self, request_id: int, count: int | None = None) -> Iterable[tuple[int, int]]:
        layout = self.manager.layout
        for group, table in zip(layout.groups, self.manager.block_table(request_id), strict=True):
            size = group.tokens_per_block
            for token in range(len(table) * size if count is None else count):
                for pool in (layout.pools[number] for number in group.pools):
                    start = pool.base + int(table[token // size]) * pool.block_stride
                    for view in pool.views:
                        for head in range(view.heads):
                            at = view.offset + head * view.head_stride + token % size * view.token_stride
                            yield start + at, view.row_bytes


@dataclass(slots=True)
class Pair:
    """Both sides, what was asked of them, and how long a test waits at most."""

    context: Worker
    generation: Worker
    patience: float

    @property
    def workers(self) -> tuple[Worker, Worker]:
        """Context, generation."""
        return self.context, self.generation

    def prefill(self, request_id: int, prompt: tuple[int, ...] = PROMPT, *, fill: bool = True) -> TransferRequest:
        """Give a request blocks at the context worker and fill them."""
        self.context.manager.allocate(request_id, len(prompt), prompt, max_cached_tokens=len(prompt) - 1)
        self.context.requests.add(request_id)
        if fill:
            self.context.fill(request_id, request_id)
        return TransferRequest(request_id, prompt)

    def admit(self, request: TransferRequest, request_id: int, **params: Any) -> TransferRequest:
        """Give the same prompt blocks at the generation worker; what it lacks is to be fetched."""
        prompt = request.prompt_token_ids
        cached = self.generation.manager.allocate(request_id, len(prompt), prompt)
        self.generation.requests.add(request_id)
        given = replace(self.context.transceiver.get_disaggregated_params(request), **params)
        return TransferRequest(request_id, prompt, cached_tokens=cached, params=given)

    def fetch(self, request_id: int = 1, other_id: int = 11, prompt: tuple[int, ...] = PROMPT) -> TransferRequest:
        """Prefill, send, and fetch; returns the generation worker's request."""
        request = self.prefill(request_id, prompt)
        self.context.transceiver.respond_and_send_async(request)
        received = self.admit(request, other_id)
        self.generation.transceiver.request_and_receive_async(received)
        return received

    def ends(self, request_id: int = 1, other_id: int = 11) -> tuple[TransferEvent, TransferEvent]:
        """(context's, generation's) event of a request, waited for."""
        found = [self.end(worker, each) for worker, each in zip(self.workers, (request_id, other_id), strict=True)]
        return found[0], found[1]

    def end(self, worker: Worker, request_id: int) -> TransferEvent:
        """One side's event of a request, waited for."""

        def is_told() -> bool:
            worker.listen()
            return request_id in worker.events

        self.wait(is_told, f"the {worker.role} worker never told the end of request {request_id}")
        return worker.events[request_id]

    def wait(self, condition: Callable[[], object], message: str) -> None:
        """Wait until something is true; a failure says what did not come."""
        deadline = time.monotonic() + self.patience
        while not condition():
            assert time.monotonic() < deadline, f"{message} (waited {self.patience:g} s)"
            time.sleep(0.005)

    def require_equal(self, request_id: int = 1, other_id: int = 11, count: int = len(PROMPT)) -> None:
        """Fail unless the prompt's KV is the same at both sides."""
        ours, theirs = self.context.tokens(request_id, count), self.generation.tokens(other_id, count)
        wrong = sum(one != other for one, other in zip(ours, theirs, strict=True))
        assert not wrong, f"{wrong} of {len(ours)} bytes of the prompt differ at the generation worker"
