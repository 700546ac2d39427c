"""Workers of several ranks each, within this process: what arrives, and outcomes that agree."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from kvferry.testing.worker_pair import SMALL_GEOMETRY
from kvferry.testing.world_pair import Side, WorldPair, start_world, world_pair
from kvferry.transceiver import session_transceiver
from kvferry_plugins.errors import HandshakeError, PeerLostError, TransferCancelledError, TransferError
from kvferry_plugins.testing import ScriptedAgent
from kvferry_plugins.testing.faults import FailPost, Hold
from kvferry_plugins.types import LayerShape, ModelGeometry, Role, RoleShape, Topology, TransferRequest

PROMPT = tuple(range(100, 130))

FULL = ModelGeometry(num_layers=4, kv_heads=4, head_dim=4, dtype="float32", windows=(None,) * 4)
GROUPED_QUERY = ModelGeometry(num_layers=4, kv_heads=2, head_dim=4, dtype="float32", windows=(None,) * 4)
WINDOWS = ModelGeometry(num_layers=4, kv_heads=2, head_dim=4, dtype="float32", windows=(8, None, 8, 8))
LATENT = ModelGeometry(
    num_layers=2,
    kv_heads=1,
    head_dim=6,
    dtype="float32",
    windows=(None, None),
    layers=tuple(LayerShape((RoleShape("latent", 1, 6),), "latent") for _ in range(2)),
)
HYBRID = ModelGeometry(
    num_layers=3,
    kv_heads=2,
    head_dim=4,
    dtype="float32",
    windows=(None,) * 3,
    layers=(
        LayerShape(tuple(RoleShape(name, 2, 4) for name in ("key", "value"))),
        LayerShape((RoleShape("conv", 4, 3), RoleShape("ssm", 4, 5)), "state"),
        LayerShape(tuple(RoleShape(name, 2, 4) for name in ("key", "value"))),
    ),
)


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


PATIENT = {"kv_transfer_admission_timeout_ms": 60_000, "kv_transfer_timeout_ms": 60_000}
"""No clock runs out while a busy machine does something else."""


def shape(tensor: int, pipeline: int = 1, *, config: Mapping[str, Any] = PATIENT, **rest: Any) -> Side:
    return Side(Topology(tensor, pipeline), config=config, **rest)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WorldPair]]:
    """Start a pair of worlds; in the end nothing may be left of any request. ``clean=False``: a test says why not."""
    monkeypatch.setattr(session_transceiver, "SHUTDOWN_SECONDS", 1.0)
    with ExitStack() as stack:
        pairs = []

        def start(*sides: Side, clean: bool = True, **rest: Any) -> WorldPair:
            pair = stack.enter_context(world_pair(*sides, **rest))
            if clean:
                pairs.append(pair)
            return pair

        yield start
        for pair in pairs:
            for rank in (*pair.context, *pair.generation):
                wait_until(lambda rank=rank: rank.transceiver.drained)
                wait_until(lambda rank=rank: not rank.transceiver.status_dump()["sends"])
                wait_until(lambda rank=rank: not rank.transceiver.status_dump()["receives"])
                dump = rank.transceiver.status_dump()
                assert dump["counters"].get("internal_errors", 0) == 0
                assert (dump["verdicts"]["waiting"], dump["verdicts"]["cases"]) == ([], [])
                assert rank.agent.counters.in_flight == 0


def hand_over(pair: WorldPair, request_id: int = 1, prompt: tuple[int, ...] = PROMPT) -> TransferRequest:
    """A whole hand-off, compared byte by byte on every rank."""
    request = pair.prefill(request_id, prompt)
    received = pair.admit(request, request_id + 100)
    before = pair.snapshot()
    pair.receive(received)
    pair.respond(request)
    assert outcomes(pair, Role.GENERATION) == {"completed"}
    assert outcomes(pair, Role.CONTEXT) == {"completed"}
    assert pair.wrong_bytes(before, received, request_id) == 0
    return received


def outcomes(pair: WorldPair, role: Role) -> set[str]:
    return {event.outcome for event in pair.ends(role)}


def start_one(pair: WorldPair, request_id: int = 1, **params: Any) -> tuple[TransferRequest, TransferRequest]:
    request = pair.prefill(request_id, PROMPT)
    received = replace(pair.admit(request, request_id + 100), **params)
    return request, received


def die(*ranks: Any) -> None:
    """End as processes that are killed: without a word."""
    for rank in ranks:
        rank.transceiver._shared.channel.send = lambda address, body: False
        rank.agent.kill()
    for rank in ranks:
        rank.transceiver.shutdown()


@pytest.mark.parametrize(
    ("context", "generation", "geometry"),
    [
        (shape(1), shape(2), FULL),
        (shape(4), shape(1), FULL),
        (shape(2, 2), shape(4), FULL),
        (shape(1, 2), shape(2, 2, tokens_per_block=8), FULL),
        (shape(4, tokens_per_block=8), shape(2, tokens_per_block=4), GROUPED_QUERY),
        (shape(2), shape(4), GROUPED_QUERY),
        (shape(4), shape(2, 2), LATENT),
        (shape(2, manager="V2"), shape(1, 2, manager="V2"), WINDOWS),
        (shape(1, 2), shape(2, manager="V2"), WINDOWS),
        (shape(2, manager="V2"), shape(1, manager="V2"), HYBRID),
    ],
    ids=["1-2", "4-1", "2x2-4", "blocks", "gqa 4-2", "gqa 2-4", "mla", "windows", "v1-v2", "states"],
)
def test_what_arrives_on_every_rank_is_what_was_sent_and_nothing_else_changes(run, context, generation, geometry):
    if geometry is LATENT:
        context, generation = replace(context, manager="V2"), replace(generation, manager="V2")
    pair = run(context, generation, geometry=geometry)
    hand_over(pair)
    hand_over(pair, 2, tuple(range(17)))


def test_a_prefix_that_is_there_stays_and_the_rest_comes(run):
    pair = run(shape(2), shape(4), geometry=GROUPED_QUERY)
    received = hand_over(pair)
    for rank in pair.generation:
        rank.transceiver.commit_blocks_for_reuse(received)
        rank.manager.free(received.request_id)
    again = hand_over(pair, 2)
    assert again.cached_tokens == 28


def test_ranks_that_have_nothing_for_anybody_end_as_well(run):
    pair = run(shape(4, manager="V2"), shape(1, manager="V2"), geometry=LATENT)
    hand_over(pair)
    moved = [rank.agent.counters.nbytes for rank in pair.context]
    assert sorted(moved)[:3] == [0, 0, 0]
    assert sum(moved) == len(PROMPT) * 6 * 4 * 2


def test_the_status_shows_ranks_parts_and_verdicts(run):
    pair = run(shape(2), shape(1), scripts={(Role.CONTEXT, 1): [Hold()]})
    request, received = start_one(pair)
    pair.receive(received)
    pair.respond(request)
    generation = pair.generation[0].transceiver
    wait_until(lambda: [part["state"] for part in parts(generation)] == ["completed", "receiving"])
    context = [rank.transceiver.status_dump() for rank in pair.context]
    assert [dump["ranks"]["rank"] for dump in context] == [0, 1]
    wait_until(lambda: pair.context[0].transceiver.status_dump()["verdicts"]["cases"])
    (case,) = pair.context[0].transceiver.status_dump()["verdicts"]["cases"]
    assert case["reports"] == {"0": "completed"}
    (send,) = context[1]["sends"]
    assert [part["state"] for part in send["parts"]] == ["posting"]
    pair.context[1].agent.release()
    assert outcomes(pair, Role.CONTEXT) | outcomes(pair, Role.GENERATION) == {"completed"}
    assert pair.context[1].transceiver.status_dump()["verdicts"]["verdicts"] == {"completed": 1}


def parts(transceiver: Any) -> list[dict[str, Any]]:
    receives = transceiver.status_dump()["receives"]
    return receives[0]["parts"] if receives else []


# --- outcomes that agree -------------------------------------------------------------------------------------------


def held_in_mid_write(run):
    """Two ranks a side, and a request of which every context rank has posted what does not end yet."""
    pair = run(shape(2), shape(2), scripts={(Role.CONTEXT, n): [Hold()] for n in (0, 1)})
    request, received = start_one(pair)
    pair.receive(received)
    pair.respond(request)
    for each in pair.context:
        wait_until(lambda each=each: each.agent.counters.in_flight)
    return pair, request, received


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cancellation_on_one_context_rank_cancels_everywhere(run, rank):
    pair, request, _ = held_in_mid_write(run)
    pair.context[rank].transceiver.cancel_request(request)
    for each in pair.context:
        each.agent.release()
    assert outcomes(pair, Role.CONTEXT) == outcomes(pair, Role.GENERATION) == {"cancelled"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cancellation_on_one_generation_rank_cancels_everywhere(run, rank):
    pair, _, received = held_in_mid_write(run)
    pair.generation[rank].transceiver.cancel_request(received)
    for each in pair.context:
        each.agent.release()
    events = pair.ends(Role.GENERATION)
    assert {event.outcome for event in events} == outcomes(pair, Role.CONTEXT) == {"cancelled"}
    assert all(isinstance(event.error, TransferCancelledError) for event in events)


@pytest.mark.parametrize("by", ["context", "generation"])
def test_a_request_of_which_one_part_is_complete_can_still_be_cancelled(run, by):
    pair = run(shape(2), shape(1), scripts={(Role.CONTEXT, 1): [Hold()]})
    request, received = start_one(pair)
    pair.receive(received)
    pair.respond(request)
    wait_until(lambda: pair.context[0].transceiver.status_dump()["verdicts"]["waiting"])
    wait_until(lambda: pair.context[1].agent.counters.in_flight)
    if by == "context":  # on the rank whose part is over
        pair.context[0].transceiver.cancel_request(request)
    else:
        pair.generation[0].transceiver.cancel_request(received)
    pair.context[1].agent.release()
    assert outcomes(pair, Role.CONTEXT) == outcomes(pair, Role.GENERATION) == {"cancelled"}


def test_a_write_that_fails_on_one_context_rank_fails_everywhere(run):
    pair = run(shape(2), shape(2), scripts={(Role.CONTEXT, 1): [FailPost()], (Role.CONTEXT, 0): [Hold()]})
    request, received = start_one(pair)
    pair.receive(received)
    pair.respond(request)
    wait_until(lambda: pair.context[0].agent.counters.in_flight)
    context = [rank.transceiver for rank in pair.context]
    wait_until(lambda: pair.context[1].transceiver.status_dump()["sends"] == [])
    pair.context[0].agent.release()
    events = pair.ends(Role.CONTEXT)
    assert {event.outcome for event in events} == outcomes(pair, Role.GENERATION) == {"failed"}
    assert "on rank 1" in str(events[0].error) or "another rank" in str(events[0].error)
    assert all(transceiver.status_dump()["ready"] for transceiver in context)


def test_an_engine_that_is_behind_on_one_context_rank_is_waited_for(run):
    pair = run(shape(2), shape(1))
    request, received = start_one(pair)
    pair.receive(received)
    pair.context[0].transceiver.respond_and_send_async(request)
    wait_until(lambda: pair.context[1].transceiver.status_dump()["held_tables"] == 1)
    assert pair.generation[0].transceiver.check_gen_transfer_status(0).events == ()
    pair.context[1].transceiver.respond_and_send_async(request)
    assert outcomes(pair, Role.GENERATION) == outcomes(pair, Role.CONTEXT) == {"completed"}


def test_an_engine_that_is_behind_on_one_generation_rank_is_waited_for(run):
    pair = run(shape(1), shape(2))
    request, received = start_one(pair)
    pair.respond(request)
    pair.generation[1].transceiver.request_and_receive_async(received)
    wait_until(lambda: pair.generation[0].transceiver.status_dump()["verdicts"]["cases"])
    assert pair.context[0].transceiver.check_context_transfer_status(0).events == ()
    pair.generation[0].transceiver.request_and_receive_async(received)
    assert outcomes(pair, Role.GENERATION) == outcomes(pair, Role.CONTEXT) == {"completed"}


def test_an_engine_that_begins_after_the_end_hears_of_it(run):
    pair = run(shape(1), shape(2))
    request, received = start_one(pair)
    pair.generation[1].transceiver.request_and_receive_async(received)
    pair.generation[1].transceiver.cancel_request(received)
    wait_until(lambda: pair.generation[0].transceiver.status_dump()["verdicts"]["told_early"])
    pair.generation[0].transceiver.request_and_receive_async(received)
    assert outcomes(pair, Role.GENERATION) == {"cancelled"}
    pair.context[0].transceiver.cancel_request(request)


def test_a_generation_rank_that_never_asks_is_said_so_in_time(run):
    pair = run(
        shape(1, config={"kv_transfer_admission_timeout_ms": 1_500, "kv_transfer_timeout_ms": 60_000}),
        shape(2, config={"kv_transfer_admission_timeout_ms": 1_000, "kv_transfer_timeout_ms": 1_000}),
    )
    request, received = start_one(pair)
    pair.respond(request)
    pair.generation[0].transceiver.request_and_receive_async(received)
    (event,) = pair.ends(Role.CONTEXT)
    assert event.outcome == "failed"
    assert "1 of the generation worker's 2 ranks have asked for it" in str(event.error)
    wait_until(lambda: pair.generation[1].transceiver.status_dump()["verdicts"]["told_early"])
    assert pair.generation[0].transceiver.check_gen_transfer_status(1).failed == (101,)


def test_another_generation_worker_may_fetch_when_the_first_is_gone(run):
    scripts = {(Role.CONTEXT, n): [Hold()] for n in (0, 1)}
    pair = run(shape(2), shape(2), scripts=scripts, clean=False)
    request, received = start_one(pair)
    pair.receive(received)
    pair.respond(request)
    for each in pair.context:
        wait_until(lambda each=each: each.agent.counters.in_flight)
    die(*pair.generation)
    for each in pair.context:
        wait_until(lambda each=each: [send["state"] for send in each.transceiver.status_dump()["sends"]] == ["waiting"])
        each.agent.release()
    hub = pair.context[0].agent.hub
    with ExitStack() as stack:
        another = start_world(
            stack, Role.GENERATION, shape(2), SMALL_GEOMETRY, lambda rank: ScriptedAgent(f"other {rank}", hub=hub)
        )
        pair = WorldPair(pair.context, another)
        received = pair.admit(request, 101)
        before = pair.snapshot()
        pair.receive(received)
        assert outcomes(pair, Role.GENERATION) == outcomes(pair, Role.CONTEXT) == {"completed"}
        assert pair.wrong_bytes(before, received, 1) == 0


# --- losses --------------------------------------------------------------------------------------------------------


def test_a_lost_context_rank_fails_what_is_in_flight_and_names_it(run):
    pair = run(shape(2), shape(2), scripts={(Role.CONTEXT, n): [Hold()] for n in (0, 1)}, clean=False)
    request, received = start_one(pair)
    pair.receive(received)
    pair.respond(request)
    for each in pair.context:
        wait_until(lambda each=each: each.agent.counters.in_flight)
    die(pair.context[1])
    survivor = pair.context[0].transceiver
    (event,) = survivor.check_context_transfer_status(1).events
    assert event.outcome == "failed"
    wait_until(lambda: not survivor.status_dump()["ready"])
    with pytest.raises(PeerLostError, match="rank 1 of this instance is lost"):
        survivor.respond_and_send_async(TransferRequest(1, PROMPT))
    pair.context[0].agent.release()
    assert outcomes(pair, Role.GENERATION) == {"failed"}
    for rank in pair.generation:
        wait_until(lambda rank=rank: rank.transceiver.drained)
        assert rank.transceiver.status_dump()["ready"]


def test_a_lost_generation_rank_fails_what_is_in_flight_on_all(run):
    pair = run(shape(2), shape(2), scripts={(Role.CONTEXT, n): [Hold()] for n in (0, 1)}, clean=False)
    request, received = start_one(pair)
    pair.receive(received)
    pair.respond(request)
    for each in pair.context:
        wait_until(lambda each=each: each.agent.counters.in_flight)
    die(pair.generation[1])
    (event,) = pair.generation[0].transceiver.check_gen_transfer_status(1).events
    assert isinstance(event.error, PeerLostError | TransferError)
    wait_until(lambda: not pair.generation[0].transceiver.status_dump()["ready"])
    for each in pair.context:
        each.agent.release()
    assert len(outcomes(pair, Role.CONTEXT)) == 1
    for rank in (*pair.context, pair.generation[0]):
        wait_until(lambda rank=rank: rank.transceiver.drained)


# --- worlds that do not go together --------------------------------------------------------------------------------


def test_worlds_between_which_nothing_can_be_handed_over_refuse_each_other(run):
    pair = run(shape(2, tokens_per_block=4), shape(2, tokens_per_block=6))
    request, received = start_one(pair)
    pair.respond(request)
    pair.receive(received)
    events = pair.ends(Role.GENERATION)
    assert {event.outcome for event in events} == {"failed"}
    assert any(isinstance(event.error, HandshakeError) and "tokens_per_block" in event.error.fields for event in events)
    for rank in pair.context:
        rank.transceiver.cancel_request(request)
    assert outcomes(pair, Role.CONTEXT) == {"cancelled"}
