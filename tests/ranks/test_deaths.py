"""Ranks that are killed, and requests that are cancelled on one rank, while chunks are on their way."""

import signal

import pytest
from ranks.worlds import PAIRINGS, PROMPT, Processes, Worker, World, opened, together, until

from kvferry_plugins.types import ModelGeometry, Topology

GEOMETRY = ModelGeometry(4, 4, 4, "float16", (None,) * 4)
LOST = {"PeerLostError", "TransferError", "TransferTimeoutError", "TransferCancelledError"}

both = pytest.mark.parametrize("processes", PAIRINGS[:2], indirect=True, ids=str)


def under_way(world: World, request: int = 1) -> None:
    """One chunk is at every generation rank, and the rest is not computed."""
    world.prefill(request, [16])
    world.receive(request)
    for rank in world.generation:
        until(lambda rank=rank: [part["state"] for part in parts(rank)] == ["receiving"] * len(parts(rank)) != [])
        until(lambda rank=rank: all(part["bytes_done"] for part in parts(rank)))


def parts(rank) -> list[dict]:
    receives = rank.ask("status")["receives"]
    return receives[0]["parts"] if receives else []


@both
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_context_rank_fails_the_request_everywhere_and_both_workers_go_on_or_say_why(
    processes: Processes, victim: int
) -> None:
    two = Worker(Topology(tensor=2))
    with opened(processes, two, two, GEOMETRY) as world:
        under_way(world)
        world.context[victim].kill()
        (survivor,) = [rank for rank in world.context if rank.alive]
        ends = world.ends()
        assert {end["outcome"] for end in ends} == {"failed"}, ends
        assert {end["error"] for end in ends} <= LOST, ends
        until(lambda: not survivor.ask("status")["ready"])
        assert f"rank {victim} of this instance is lost" in survivor.ask("status")["ranks"]["error"]
        assert all(rank.ask("status")["ready"] for rank in world.generation)
        world.free(1)
        world.settle()


@both
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_generation_rank_ends_the_request_everywhere(processes: Processes, victim: int) -> None:
    two = Worker(Topology(tensor=2))
    with opened(processes, two, two, GEOMETRY) as world:
        under_way(world)
        world.generation[victim].kill()
        (survivor,) = [rank for rank in world.generation if rank.alive]
        (end,) = world.ends([survivor])
        assert end["outcome"] == "failed"
        until(lambda: not survivor.ask("status")["ready"])
        assert f"rank {victim} of this instance is lost" in survivor.ask("status")["ranks"]["error"]
        together(world.context, "cancel", request_id=1)  # as an engine does whose request nobody fetches again
        ends = world.ends(world.context)
        assert len({end["outcome"] for end in ends}) == 1, ends
        assert all(rank.ask("status")["ready"] for rank in world.context)
        world.free(1)
        world.settle()


@both
@pytest.mark.timeout(300)
@pytest.mark.parametrize("side", ["context", "generation"])
def test_a_cancellation_on_one_rank_cancels_everywhere_and_the_next_request_completes(
    processes: Processes, side: str
) -> None:
    with opened(processes, Worker(Topology(2, 2)), Worker(Topology(2)), GEOMETRY) as world:
        under_way(world)
        getattr(world, side)[1].ask("cancel", request_id=1)
        ends = world.ends()
        assert {end["outcome"] for end in ends} == {"cancelled"}, ends
        world.free(1)
        world.settle()
        world.prefill(2, [len(PROMPT)])
        world.receive(2)
        assert {end["outcome"] for end in world.ends()} == {"completed"}
        assert [rank.ask("wrong_bytes", request_id=2, seed=2) for rank in world.generation] == [0, 0]
        world.free(2)
        world.settle()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", PAIRINGS[:1], indirect=True, ids=str)
def test_a_rank_that_is_stopped_is_lost_and_says_so_itself_when_it_goes_on(processes: Processes) -> None:
    two = Worker(Topology(tensor=2))
    with opened(processes, two, two, GEOMETRY) as world:
        stopped, survivor = world.context[1], world.context[0]
        stopped.signal(signal.SIGSTOP)
        try:
            until(lambda: not survivor.ask("status")["ready"])
            assert "rank 1 of this instance is lost" in survivor.ask("status")["ranks"]["error"]
        finally:
            stopped.signal(signal.SIGCONT)
        until(lambda: not stopped.ask("status")["ready"])
