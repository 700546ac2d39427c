"""Processes that are no instance together: one clear error on every one of them, in time."""

from dataclasses import replace

import pytest
from ranks.worlds import PAIRINGS, Processes, Worker, orders, together

from kvferry.testing.rank_process import RankError, RankProcess
from kvferry_plugins.types import ModelGeometry, Role, Topology

GEOMETRY = ModelGeometry(4, 4, 4, "float16", (None,) * 4)
FOUR = Worker(Topology(tensor=2, pipeline=2))

one = pytest.mark.parametrize("processes", PAIRINGS[:1], indirect=True, ids=str)


def errors(ranks: list[RankProcess]) -> list[str]:
    said = []
    for rank in ranks:
        with pytest.raises(RankError) as caught:
            rank.answer()
        said.append(str(caught.value))
    return said


@one
@pytest.mark.timeout(200)
def test_two_ranks_with_one_id_are_named_on_every_rank(processes: Processes) -> None:
    wanted = orders(Role.CONTEXT, FOUR, GEOMETRY, processes.pairing)
    wanted[3] = replace(wanted[3], ranks=replace(wanted[3].ranks, rank=2))
    ranks = processes.take(Role.CONTEXT, 4)
    for rank, order in zip(ranks, wanted, strict=True):
        rank.tell("open", order=order)
    assert all("two processes are rank 2" in message for message in errors(ranks))
    together(ranks, "close")


@one
@pytest.mark.timeout(200)
def test_a_rank_that_never_joins_is_named_on_every_rank(processes: Processes) -> None:
    wanted = orders(Role.CONTEXT, FOUR, GEOMETRY, processes.pairing, join_timeout_ms=6_000)
    ranks = processes.take(Role.CONTEXT, 3)
    for rank, order in zip(ranks, wanted[:2] + wanted[3:], strict=True):
        rank.tell("open", order=order)
    assert all("rank 2 of 4 did not join within 6 s" in message for message in errors(ranks))
    together(ranks, "close")


@one
@pytest.mark.timeout(200)
def test_ranks_of_two_checkpoints_are_told_which_field_differs(processes: Processes) -> None:
    wanted = orders(Role.CONTEXT, Worker(Topology(tensor=2)), GEOMETRY, processes.pairing)
    wanted[1] = replace(wanted[1], model={**wanted[1].model, "weights": "w1"})
    ranks = processes.take(Role.CONTEXT, 2)
    for rank, order in zip(ranks, wanted, strict=True):
        rank.tell("open", order=order)
    assert all(
        "rank 1" in message and "model.weights: 'w0' at rank 0, 'w1' there" in message for message in errors(ranks)
    )
    together(ranks, "close")
