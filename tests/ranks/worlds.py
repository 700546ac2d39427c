"""Processes that last from test to test, and the worlds that are opened in them."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry.testing.rank_process import RankOrder, RankProcess
from kvferry.testing.world_pair import free_port
from kvferry_plugins.types import DisaggregatedParams, ModelGeometry, RankSpec, Role, Topology

PROMPT = tuple(range(100, 130))
JOIN_MS = 60_000


@dataclass(frozen=True)
class Pairing:
    """What all ranks run on."""

    runtime: str
    backend: str

    def __str__(self) -> str:
        return f"{self.runtime}-{self.backend}"


PAIRINGS = (Pairing("PYTHON", "NIXL"), Pairing("CPP", "UCX"), Pairing("CPP", "NIXL"))


@dataclass(frozen=True)
class Worker:
    """One side."""

    topology: Topology = field(default_factory=Topology)
    manager: str = "V1"
    tokens_per_block: int = 4

    def settings(self, pairing: Pairing) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.topology.tensor,
            "pipeline_parallel_size": self.topology.pipeline,
            "cache_transceiver_config": {
                "backend": pairing.backend,
                "transceiver_runtime": pairing.runtime,
                "kv_transfer_poll_interval_ms": 200,
                "kv_transfer_checksum": True,
            },
            "kv_cache_config": {
                "tokens_per_block": self.tokens_per_block,
                "max_tokens": 256,
                "use_kv_cache_manager_v2": self.manager == "V2",
            },
        }


class Processes:
    """As many processes as the largest world has needed so far, for one pairing."""

    def __init__(self, pairing: Pairing, environ: Mapping[str, str]) -> None:
        self.pairing = pairing
        self._environ = environ
        self._idle: dict[Role, list[RankProcess]] = {role: [] for role in Role}

    def take(self, role: Role, number: int) -> list[RankProcess]:
        self._idle[role] = [process for process in self._idle[role] if process.alive]
        while len(self._idle[role]) < number:
            self._idle[role].append(RankProcess(self._environ))
        return self._idle[role][:number]

    def close(self) -> None:
        for process in itertools.chain(*self._idle.values()):
            process.close()


@dataclass
class World:
    """A context and a generation worker that run."""

    context: list[RankProcess]
    generation: list[RankProcess]

    @property
    def alive(self) -> list[RankProcess]:
        return [rank for rank in (*self.context, *self.generation) if rank.alive]

    def prefill(self, request: int, chunks: Sequence[int], prompt: tuple[int, ...] = PROMPT, **how: Any) -> None:
        together(self.context, "prefill", request_id=request, prompt=prompt, chunks=chunks, **how)

    def receive(self, request: int, prompt: tuple[int, ...] = PROMPT) -> DisaggregatedParams:
        """Every generation rank fetches what a context worker has announced."""
        params = self.context[0].ask("params", request_id=request)
        together(self.generation, "allocate", request_id=request, prompt=prompt)
        together(self.generation, "receive", request_id=request, params=params)
        return params

    def ends(self, ranks: Sequence[RankProcess] | None = None) -> list[dict[str, Any]]:
        """The next outcome of each rank."""
        return together(self.alive if ranks is None else ranks, "end")

    def free(self, request: int) -> None:
        together(self.alive, "free", request_id=request)

    def settle(self) -> None:
        """Wait until no rank has anything of any request."""
        for rank in self.alive:
            until(lambda rank=rank: is_drained(rank.ask("status")))
            until(lambda rank=rank: rank.ask("in_use") == 0)


def is_drained(status: Mapping[str, Any]) -> bool:
    return not (status["ledger"]["entries"] or status["sends"] or status["receives"] or status["verdicts"]["cases"])


def together(ranks: Sequence[RankProcess], command: str, **arguments: Any) -> list[Any]:
    """Ask all at once; ranks may wait for one another."""
    for rank in ranks:
        rank.tell(command, **arguments)
    return [rank.answer() for rank in ranks]


def orders(
    role: Role, worker: Worker, geometry: ModelGeometry, pairing: Pairing, *, join_timeout_ms: int = JOIN_MS
) -> list[RankOrder]:
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    settings = worker.settings(pairing)
    return [
        RankOrder(
            role, RankSpec(rank, worker.topology, rendezvous, join_timeout_ms=join_timeout_ms), geometry, settings
        )
        for rank in range(worker.topology.ranks)
    ]


@contextmanager
def opened(processes: Processes, context: Worker, generation: Worker, geometry: ModelGeometry) -> Iterator[World]:
    """Both sides, until the end of the block."""
    sides = {Role.CONTEXT: context, Role.GENERATION: generation}
    ranks = {role: processes.take(role, worker.topology.ranks) for role, worker in sides.items()}
    try:
        for role, worker in sides.items():
            for rank, order in zip(ranks[role], orders(role, worker, geometry, processes.pairing), strict=True):
                rank.tell("open", order=order)
        for rank in itertools.chain(*ranks.values()):
            rank.answer()
        yield World(ranks[Role.CONTEXT], ranks[Role.GENERATION])
    finally:
        together([rank for rank in itertools.chain(*ranks.values()) if rank.alive], "close")


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
