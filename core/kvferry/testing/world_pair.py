"""A context and a generation worker of several ranks each, in one process, over scripted agents."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from socket import socket
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.testing.token_pattern import (
    Bytes,
    TokenRange,
    pool_memory,
    write_pattern,
    wrong_bytes,
)
from kvferry.testing.worker_pair import SHORT_CLOCKS, SMALL_GEOMETRY, SMALL_MODEL
from kvferry.topology import local_geometry
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import (
    ManagerSpec,
    ModelGeometry,
    RankSpec,
    Role,
    Topology,
    TransceiverSpec,
    TransferEvent,
    TransferRequest,
)

if TYPE_CHECKING:
    from kvferry.transceiver.session_transceiver import SessionTransceiver


ONE_RANK = Topology()


@dataclass(frozen=True, slots=True)
class Side:
    """How one worker is built."""

    topology: Topology = ONE_RANK
    manager: str = "V1"
    """``V1`` or ``V2``."""
    tokens_per_block: int = 4
    max_tokens: int = 256
    config: Mapping[str, Any] = field(default_factory=dict)
    """``cache_transceiver_config`` over ``SHORT_CLOCKS``."""


@dataclass(frozen=True, slots=True)
class RankWorker:
    """One rank."""

    manager: KVCacheManager
    transceiver: "SessionTransceiver"
    agent: TransferAgent

    @property
    def memory(self) -> list[Bytes]:
        """Its pools."""
        return pool_memory(self.manager.layout)

    def fill(self, request_id: int, tokens: int, seed: int) -> None:
        """Write a request's pattern, as a prefill of so many tokens would leave it."""
        layout, tables = self.manager.layout, self.manager.block_table(request_id)
        write_pattern(layout, self.memory, tables, TokenRange(0, tokens), seed)


@dataclass(frozen=True, slots=True)
class WorldPair:
    """The ranks of a context and of a generation worker that can reach each other."""

    context: tuple[RankWorker, ...]
    generation: tuple[RankWorker, ...]

    def prefill(self, request_id: int, prompt: tuple[int, ...]) -> TransferRequest:
        """Give a request blocks on every context rank and fill them with the pattern whose seed is its id."""
        for rank in self.context:
            rank.manager.allocate(request_id, len(prompt), prompt, max_cached_tokens=len(prompt) - 1)
            rank.manager.extend(request_id, len(prompt))
            rank.fill(request_id, len(prompt), request_id)
        return TransferRequest(request_id, prompt)

    def respond(self, request: TransferRequest) -> None:
        """Let every context rank send."""
        for rank in self.context:
            rank.transceiver.respond_and_send_async(request)

    def admit(self, request: TransferRequest, request_id: int) -> TransferRequest:
        """Give the same prompt blocks on every generation rank; what they lack is to be fetched."""
        prompt = request.prompt_token_ids
        cached = [
            rank.manager.allocate(request_id, len(prompt) + 1, prompt, history_tokens=len(prompt))
            for rank in self.generation
        ]
        params = self.context[0].transceiver.get_disaggregated_params(request)
        return TransferRequest(request_id, prompt, cached_tokens=min(cached), params=params)

    def receive(self, request: TransferRequest) -> None:
        """Let every generation rank fetch."""
        for rank in self.generation:
            rank.transceiver.request_and_receive_async(request)

    def snapshot(self) -> list[list[Bytes]]:
        """Every generation rank's memory, a copy."""
        return [[pool.copy() for pool in rank.memory] for rank in self.generation]

    def wrong_bytes(self, before: list[list[Bytes]], request: TransferRequest, seed: int) -> int:
        """Bytes of the generation ranks that are not what a hand-off of ``request`` should have left."""
        tokens = TokenRange(request.cached_tokens, len(request.prompt_token_ids))
        return sum(
            wrong_bytes(
                rank.manager.layout,
                rank.memory,
                pools,
                rank.manager.block_table(request.request_id),
                tokens,
                seed,
            )
            for rank, pools in zip(self.generation, before, strict=True)
        )

    def ends(self, role: Role, *, seconds: float = 30.0) -> list[TransferEvent]:
        """The next end on each rank of a side, in rank order; waits for them."""
        ranks = self.context if role is Role.CONTEXT else self.generation
        return [_end(rank.transceiver, role, seconds) for rank in ranks]


def _end(transceiver: "SessionTransceiver", role: Role, seconds: float) -> TransferEvent:
    import time

    check = transceiver.check_context_transfer_status if role is Role.CONTEXT else transceiver.check_gen_transfer_status
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        events = check(1).events
        if events:
            return events[0]
    raise TimeoutError(f"no end within {seconds:g} s: {transceiver.status_dump()}")


@contextmanager
def world_pair(
    context: Side = Side(),
    generation: Side = Side(),
    *,
    geometry: ModelGeometry = SMALL_GEOMETRY,
    scripts: Mapping[tuple[Role, int], Any] | None = None,
) -> Iterator[WorldPair]:
    """Run all ranks of both sides on the PYTHON runtime; everything is shut down at the end.

    Args:
        context: how the context worker is built.
        generation: how the generation worker is built.
        geometry: of the whole model.
        scripts: faults of a rank's agent, by role and rank.
    """
    hub = ScriptedHub()

    def agents(role: Role) -> Callable[[int], TransferAgent]:
        return lambda rank: ScriptedAgent(f"{role.value} {rank}", (scripts or {}).get((role, rank), ()), hub=hub)

    with ExitStack() as stack:
        yield WorldPair(
            start_world(stack, Role.CONTEXT, context, geometry, agents(Role.CONTEXT)),
            start_world(stack, Role.GENERATION, generation, geometry, agents(Role.GENERATION)),
        )


def start_world(
    stack: ExitStack,
    role: Role,
    side: Side,
    geometry: ModelGeometry,
    make_agent: Callable[[int], TransferAgent],
) -> tuple[RankWorker, ...]:
    """Start all ranks of one side at once, as they wait for one another; ``stack`` ends them."""
    number = side.topology.ranks
    rendezvous = f"tcp://127.0.0.1:{free_port()}"
    with ThreadPoolExecutor(number) as threads:
        starting = [
            threads.submit(
                _start_rank, role, side, geometry, RankSpec(rank, side.topology, rendezvous), make_agent(rank)
            )
            for rank in range(number)
        ]
    for each in starting:
        if each.exception() is None:
            worker = each.result()
            stack.callback(worker.manager.shutdown)
    workers = []
    for each in starting:
        if each.exception() is None:
            stack.callback(each.result().transceiver.shutdown)
            workers.append(each.result())
    for each in starting:
        each.result()
    return tuple(workers)


def _start_rank(role: Role, side: Side, geometry: ModelGeometry, ranks: RankSpec, agent: TransferAgent) -> RankWorker:
    from kvferry.transceiver.python_runtime import KvCacheTransceiverV2

    manager = make_manager(side, geometry, ranks.rank)
    try:
        spec = TransceiverSpec(
            role=role,
            runtime="PYTHON",
            backend="SCRIPTED",
            manager=manager,
            create_agent=lambda _: agent,
            model=SMALL_MODEL,
            config={**SHORT_CLOCKS, **side.config},
            ranks=ranks,
        )
        return RankWorker(manager, KvCacheTransceiverV2(spec), agent)
    except BaseException:
        manager.shutdown()
        raise


def make_manager(side: Side, geometry: ModelGeometry, rank: int, *, shared: bool = False) -> KVCacheManager:
    """Make one rank's manager, whose memory is drawn from its rank: nothing in it looks like a hand-off."""
    from kvferry.cache.manager_v1 import KVCacheManagerV1
    from kvferry.cache.manager_v2 import KVCacheManagerV2

    own = local_geometry(geometry, side.topology, rank)
    spec = ManagerSpec(side.manager, own, side.tokens_per_block, side.max_tokens, 0.1, True, "cpu", shared=shared)
    manager = KVCacheManagerV1(spec) if side.manager == "V1" else KVCacheManagerV2(spec)
    for pool in pool_memory(manager.layout):
        pool[:] = np.random.default_rng(rank).integers(0, 256, len(pool), dtype=np.uint8)
    return manager


def free_port() -> int:
    """A port of the loopback device that nobody listens on now."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
