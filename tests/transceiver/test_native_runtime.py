import ctypes
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from transceiver.native import (
    BLOCK_BYTES,
    MANAGER,
    TOKENS_PER_BLOCK,
    ShuffledManager,
    TwoPoolManager,
    make_native_agent,
    open_things,
    running_native_worker,
    specify,
)

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.testing.worker_pair import Worker, WorkerPair
from kvferry.transceiver import native_options
from kvferry.transceiver.native_runtime import KvCacheTransceiverCpp
from kvferry_plugins.errors import BackendUnavailableError, ConfigError, PeerLostError, TransferError
from kvferry_plugins.testing import ScriptedAgent
from kvferry_plugins.types import COPY_THREADS, MAP_PEERS, STAGING_BYTES, AgentSpec, Role, TransferRequest

BLOCKS = 160
LONG = tuple(range(BLOCKS * TOKENS_PER_BLOCK))
SLOW = {"delay_us": 20_000, "piece_bytes": BLOCK_BYTES}
"""Four blocks in 20 ms: the long prompt takes most of a second."""

Run = Callable[..., WorkerPair]


@pytest.fixture
def run_native(kit: Any) -> Iterator[Run]:
    """Start a pair; at the end nothing may be left of any request, on either side."""
    pairs: list[WorkerPair] = []
    with ExitStack() as stack:

        def run(
            *,
            manager: type[KVCacheManagerV1] = KVCacheManagerV1,
            generation_manager: type[KVCacheManagerV1] | None = None,
            agent: dict[str, Any] | None = None,
            **config: Any,
        ) -> WorkerPair:
            sides = ((Role.CONTEXT, manager, agent or {}), (Role.GENERATION, generation_manager or manager, {}))
            workers = [
                stack.enter_context(running_native_worker(role, config=config, agent=options, manager=kind))
                for role, kind, options in sides
            ]
            pairs.append(WorkerPair(*workers))
            return pairs[-1]

        yield run
        for worker in (worker for pair in pairs for worker in (pair.context, pair.generation)):
            assert_whole(kit, worker)


def assert_whole(kit: Any, worker: Worker) -> None:
    kit.wait_until(lambda: worker.transceiver.drained)
    kit.wait_until(lambda: not worker.transceiver.status_dump()["sends"])
    kit.wait_until(lambda: not worker.transceiver.status_dump()["receives"])
    counted = kit.counters(worker)
    assert not {"internal_errors", "agent_errors"} & set(counted), counted
    for request_id in list(worker.manager._tables):
        worker.manager.free(request_id)
    statistics = worker.manager.statistics()
    assert statistics.free + statistics.cached == statistics.total


def ended(pair: WorkerPair) -> tuple[Any, Any]:
    """(generation's, context's) only outcome."""
    return (
        pair.generation.transceiver.check_gen_transfer_status(1).events[0],
        pair.context.transceiver.check_context_transfer_status(1).events[0],
    )


def bytes_of(worker: Worker, request_id: int) -> list[bytes]:
    """A request's KV, block by block, whatever lies between."""
    table = worker.manager.block_table(request_id)[0]
    pools = worker.manager.layout.pools
    return [
        b"".join(
            ctypes.string_at(pool.base + int(block) * pool.block_stride + offset, nbytes)
            for pool in pools
            for offset, nbytes in pool.runs
        )
        for block in table
    ]


def equal(pair: WorkerPair, request_id: int = 1, other_id: int = 11) -> bool:
    return bytes_of(pair.context, request_id) == bytes_of(pair.generation, other_id)


def send_state(pair: WorkerPair) -> dict[str, Any] | None:
    sends = pair.context.transceiver.status_dump()["sends"]
    return sends[0] if sends else None


def is_in_mid_write(pair: WorkerPair) -> bool:
    send = send_state(pair)
    return send is not None and 0 < send["bytes_done"] < send["bytes_expected"]


# --- what it is built from -----------------------------------------------------------------------------------------


def test_without_a_setting_the_staging_buffer_is_the_engines_choice():
    layout = KVCacheManagerV1(MANAGER).layout
    assert STAGING_BYTES not in native_options.native_options({}, layout, Role.CONTEXT)
    assert STAGING_BYTES not in native_options.native_options({"max_tokens_in_buffer": None}, layout, Role.CONTEXT)


def test_tokens_are_turned_into_the_bytes_that_they_take():
    layout = KVCacheManagerV1(MANAGER).layout
    options = native_options.native_options({"max_tokens_in_buffer": 8}, layout, Role.CONTEXT)
    assert options[STAGING_BYTES] == 2 * BLOCK_BYTES


@pytest.mark.parametrize(("config", "given"), [({"kv_transfer_threads": 3}, 3), ({"kv_transfer_threads": None}, None)])
def test_how_many_threads_copy_is_the_configurations_word_or_the_engines(config, given):
    options = native_options.native_options(config, KVCacheManagerV1(MANAGER).layout, Role.CONTEXT)
    assert options.get(COPY_THREADS) == given


@pytest.mark.parametrize("allowed", [True, False])
def test_whether_peers_are_mapped_is_the_configurations_word(allowed):
    config = {"kv_transfer_shared_memory": allowed}
    assert native_options.native_options(config, KVCacheManagerV1(MANAGER).layout, Role.CONTEXT)[MAP_PEERS] is allowed


def test_who_writes_to_nobody_maps_nobody():
    assert native_options.native_options({}, KVCacheManagerV1(MANAGER).layout, Role.GENERATION)[MAP_PEERS] is False


def settled() -> tuple[int, int]:
    """What is open, once threads that are on their way out have gone."""
    last, found = (0, 0), open_things()
    while found != last:
        time.sleep(0.1)
        last, found = found, open_things()
    return found


@pytest.fixture
def refused() -> Iterator[Callable[..., str]]:
    """What the construction raises; afterwards nothing is open that was not before."""
    manager = KVCacheManagerV1(MANAGER)

    def build(kind: type[Exception], make_agent: Any = make_native_agent, **config: Any) -> str:
        KvCacheTransceiverCpp(specify(Role.CONTEXT, manager, make_native_agent, {})).shutdown()  # what opens once
        before = settled()
        with pytest.raises(kind) as caught:
            KvCacheTransceiverCpp(specify(Role.CONTEXT, manager, make_agent, config))
        message = str(caught.value)
        del caught  # and the frames that it holds
        assert settled() == before
        return message

    yield build
    manager.shutdown()


def test_a_buffer_that_holds_no_block_is_refused_with_the_least_that_does(refused):
    message = refused(ConfigError, max_tokens_in_buffer=2)
    assert "cache_transceiver_config.max_tokens_in_buffer" in message
    assert "set it to 4 or more" in message


def test_a_buffer_beyond_memory_is_refused_with_the_most_that_fits(refused, monkeypatch):
    monkeypatch.setattr(native_options, "available_memory", lambda device: 10 * BLOCK_BYTES + 5)
    message = refused(ConfigError, max_tokens_in_buffer=44)
    assert "cache_transceiver_config.max_tokens_in_buffer" in message
    assert "set it to 40 or less" in message


def test_a_buffer_that_memory_has_not_got_after_all_is_one_clear_error(refused, monkeypatch):
    monkeypatch.setattr(native_options, "available_memory", lambda device: 1 << 70)
    message = refused(BackendUnavailableError, max_tokens_in_buffer=1 << 48)
    assert "a staging buffer of" in message
    assert "does not fit memory" in message


def test_memory_that_cannot_be_registered_is_one_clear_error(refused):
    def refuse_pools(spec: AgentSpec) -> Any:
        return make_native_agent(spec, refuse_registration=1, staging_bytes=0)

    def refuse_staging(spec: AgentSpec) -> Any:
        return make_native_agent(spec, refuse_registration=1)

    assert "could not register memory: asked to refuse registration" in refused(TransferError, refuse_pools)
    assert "asked to refuse registration" in refused(BackendUnavailableError, refuse_staging)


def test_an_agent_that_takes_no_block_lists_is_refused_with_what_to_do(refused):
    made: list[ScriptedAgent] = []

    def make_scripted(spec: AgentSpec) -> Any:
        made.append(ScriptedAgent(spec.name))
        return made[0]

    message = refused(BackendUnavailableError, make_scripted)
    assert "runtime CPP cannot drive backend INPROCESS" in message
    assert "set cache_transceiver_config.transceiver_runtime to PYTHON" in message
    with pytest.raises(TransferError):
        made[0].register([])  # it was closed


def test_without_kvferry_native_it_says_how_to_install_it(refused, monkeypatch):
    def make_agent(spec: AgentSpec) -> Any:
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, "kvferry_native", None)
            return make_native_agent(spec)

    assert "pip install 'kvferry[cpp]'" in refused(BackendUnavailableError, make_agent)


# --- every byte ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [4, None, 4096], ids=["tiny", "default", "large"])
def test_small_blocks_that_lie_anywhere_arrive_by_value_with_any_staging(run_native, fetch, tokens):
    pair = run_native(manager=ShuffledManager, generation_manager=KVCacheManagerV1, max_tokens_in_buffer=tokens)
    fetch(pair, prompt=LONG)
    for event in ended(pair):
        assert (event.outcome, event.nbytes, event.blocks) == ("completed", BLOCKS * BLOCK_BYTES, BLOCKS)
    assert equal(pair)


def test_the_setting_reaches_the_engine_as_bytes():
    manager, given = KVCacheManagerV1(MANAGER), []

    def make_agent(spec: AgentSpec) -> Any:
        given.append((spec.runtime, spec.options[STAGING_BYTES]))
        return make_native_agent(spec)

    config = {"max_tokens_in_buffer": 12}
    KvCacheTransceiverCpp(specify(Role.CONTEXT, manager, make_agent, config)).shutdown()
    assert given == [("CPP", 3 * BLOCK_BYTES)]


@pytest.mark.parametrize("generation_manager", [TwoPoolManager, KVCacheManagerV1])
def test_a_layout_of_several_pools_with_gaps_arrives_by_value_in_any_other(run_native, fetch, generation_manager):
    pair = run_native(manager=TwoPoolManager, generation_manager=generation_manager, kv_transfer_checksum=True)
    for number, memory in enumerate(pair.context.manager.memory):
        memory[:] = number + 1
    fetch(pair, prompt=LONG)
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]
    assert equal(pair)
    if generation_manager is TwoPoolManager:
        gaps = pair.generation.manager.memory[0][:, 256:320]
        assert not gaps.any(), "bytes between the runs are not ours to write"


def test_a_checksum_agrees_with_what_arrived(run_native, fetch):
    pair = run_native(kv_transfer_checksum=True)
    fetch(pair, prompt=LONG)
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]
    assert equal(pair)


def test_nothing_to_fetch_is_success_without_a_write(run_native, fetch, kit):
    pair = run_native()
    prompt = kit.PROMPT[:16]
    received = fetch(pair, prompt=prompt)
    ended(pair)
    pair.generation.transceiver.commit_blocks_for_reuse(received)
    again = fetch(pair, 2, 12, prompt=prompt)
    assert again.cached_tokens == 16
    generation, context = ended(pair)
    assert [generation.outcome, generation.nbytes, context.outcome] == ["completed", 0, "completed"]


@pytest.mark.parametrize("asked_first", [True, False])
def test_chunks_leave_as_they_are_computed(run_native, kit, asked_first):
    pair = run_native(enable_pipelined_transfer=True)
    request = pair.prefill(1, LONG)
    received = pair.admit(request, 11)
    if asked_first:
        pair.generation.transceiver.request_and_receive_async(received)
    for computed in (100, 101, 400, len(LONG)):
        pair.context.transceiver.respond_and_send_async(request, computed, computed == len(LONG))
        if asked_first and computed < len(LONG):
            complete = computed // TOKENS_PER_BLOCK * BLOCK_BYTES
            kit.wait_until(lambda complete=complete: (send_state(pair) or {}).get("bytes_done") == complete)
    if not asked_first:
        pair.generation.transceiver.request_and_receive_async(received)
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]
    assert equal(pair)


def faulty(rng: random.Random) -> dict[str, Any]:
    return {"again_every": 3, "fail_every": 40, "piece_bytes": 4 * BLOCK_BYTES, "delay_us": rng.randint(0, 2000)}


@pytest.mark.parametrize("seed", [1, 2])
def test_of_many_requests_each_ends_once_and_what_completed_is_right(run_native, kit, seed):
    rng, count = random.Random(seed), 60
    clocks = {"kv_transfer_timeout_ms": 20_000, "kv_transfer_admission_timeout_ms": 20_000}
    pair = run_native(agent=faulty(rng), **clocks)
    context, generation = pair.context.transceiver, pair.generation.transceiver
    ends: tuple[dict[int, Any], dict[int, Any]] = ({}, {})

    def collect() -> None:
        for found, status in zip(
            ends, (context.check_context_transfer_status(), generation.check_gen_transfer_status()), strict=True
        ):
            for event in status.events:
                assert event.request_id not in found
                found[event.request_id] = event

    sent = {}
    for number in range(count):
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 60)))
        sent[number] = pair.prefill(number, prompt)
        context.respond_and_send_async(sent[number])
        received = pair.admit(sent[number], number + 1000)
        generation.request_and_receive_async(received)
        if rng.random() < 0.15:
            context.cancel_request(sent[rng.randrange(number + 1)])
        if rng.random() < 0.15:
            generation.cancel_request(received)
        collect()
    kit.wait_until(lambda: collect() or len(ends[1]) == count, 20)
    for number in set(range(count)) - set(ends[0]):  # cancelled before the context worker heard of it
        context.cancel_request(sent[number])
    kit.wait_until(lambda: collect() or len(ends[0]) == count, 20)
    outcomes = Counter(event.outcome for event in ends[1].values())
    assert set(outcomes) == {"completed", "failed", "cancelled"}, outcomes
    for number in range(count):
        if ends[1][number + 1000].outcome == "completed":
            assert (pair.context.blocks(number) == pair.generation.blocks(number + 1000)).all()


# --- a long write --------------------------------------------------------------------------------------------------


def test_a_long_write_tells_how_far_it_is(run_native, fetch, kit):
    pair = run_native(agent=SLOW)
    fetch(pair, prompt=LONG)
    seen: list[int] = []

    def is_over() -> bool:
        receives = pair.generation.transceiver.status_dump()["receives"]
        seen.extend(receive["bytes_done"] for receive in receives)
        return not receives

    kit.wait_until(lambda: not is_over())
    kit.wait_until(is_over, 10)
    assert seen == sorted(seen)
    assert len({nbytes for nbytes in seen if 0 < nbytes < BLOCKS * BLOCK_BYTES}) >= 3
    assert [event.outcome for event in ended(pair)] == ["completed", "completed"]


@pytest.mark.parametrize("by", ["context", "generation"])
def test_a_cancellation_in_mid_write_is_prompt_and_nothing_is_written_after_it(run_native, fetch, kit, by):
    pair = run_native(agent={**SLOW, "delay_us": 100_000}, kv_transfer_timeout_ms=20_000)  # four seconds
    received = fetch(pair, prompt=LONG)
    kit.wait_until(lambda: is_in_mid_write(pair))
    requests = {"context": TransferRequest(1, LONG), "generation": received}
    getattr(pair, by).transceiver.cancel_request(requests[by])
    kit.wait_until(lambda: pair.context.transceiver.drained and pair.generation.transceiver.drained, 2)
    after = bytes_of(pair.generation, 11)
    assert [event.outcome for event in ended(pair)] == ["cancelled", "cancelled"]
    assert not equal(pair)
    time.sleep(0.2)
    assert bytes_of(pair.generation, 11) == after


@pytest.mark.parametrize("side", ["context", "generation"])
def test_a_worker_that_shuts_down_in_mid_write_waits_for_it_and_tells_its_peer(run_native, fetch, kit, side):
    pair = run_native(agent=SLOW)
    fetch(pair, prompt=LONG)
    kit.wait_until(lambda: is_in_mid_write(pair))
    started = time.monotonic()
    getattr(pair, side).transceiver.shutdown()
    assert time.monotonic() - started < 2
    generation, context = ended(pair)
    assert (generation.outcome, context.outcome) == ("failed", "failed" if side == "context" else "cancelled")
    assert isinstance({"context": context, "generation": generation}[side].error, PeerLostError)


def test_the_end_of_a_pair_leaves_nothing_open(fetch):
    def one_pair() -> None:
        with ExitStack() as stack:
            sides = [
                stack.enter_context(running_native_worker(role, config={}, agent={}, manager=KVCacheManagerV1))
                for role in Role
            ]
            pair = WorkerPair(*sides)
            fetch(pair)
            ended(pair)

    one_pair()
    before = settled()
    for _ in range(3):
        one_pair()
    assert settled() == before
