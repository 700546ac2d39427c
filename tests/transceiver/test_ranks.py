"""Ranks of one instance within this process: how they meet, and what becomes of them when one is lost."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from socket import socket
from typing import Any

import pytest

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.testing.worker_pair import SHORT_CLOCKS, SMALL_GEOMETRY, SMALL_MODEL
from kvferry.transceiver.python_runtime import KvCacheTransceiverV2
from kvferry_plugins.errors import ConfigError, HandshakeError, PeerLostError
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.types import ManagerSpec, RankSpec, Role, Topology, TransceiverSpec, TransferRequest

JOIN_MS = 20_000
"""Until all must be there, where they will be."""


def free_endpoint() -> str:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def start() -> Iterator[Callable[..., list[Any]]]:
    """Start ranks at once; returns, for each, its transceiver or the error of its start."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(8))
        hub = ScriptedHub()

        def make(spec: RankSpec, options: dict[str, Any]) -> Any:
            manager = KVCacheManagerV1(ManagerSpec("V1", SMALL_GEOMETRY, 4, 256, 0.1, True, "cpu"))
            stack.callback(manager.shutdown)
            rest = {"role": Role.CONTEXT, "model": SMALL_MODEL, "config": dict(SHORT_CLOCKS), **options}
            agent = ScriptedAgent(f"rank {spec.rank}", hub=hub)
            try:
                transceiver = KvCacheTransceiverV2(
                    TransceiverSpec(
                        runtime="PYTHON",
                        backend="SCRIPTED",
                        manager=manager,
                        create_agent=lambda _: agent,
                        ranks=spec,
                        **rest,
                    )
                )
            except Exception as error:
                return error
            stack.callback(transceiver.shutdown)
            return transceiver

        def run(*specs: RankSpec, **options: dict[str, Any]) -> list[Any]:
            """``options``: what differs of ``TransceiverSpec``, by ``rank0``, ``rank1``, … in order of ``specs``."""
            made = [threads.submit(make, spec, options.get(f"rank{n}", {})) for n, spec in enumerate(specs)]
            return [each.result() for each in made]

        yield run


def ranks(number: int, *, join_timeout_ms: int = JOIN_MS, **topology: int) -> list[RankSpec]:
    shape = Topology(**(topology or {"tensor": number}))
    endpoint = free_endpoint()
    return [RankSpec(rank, shape, endpoint, join_timeout_ms=join_timeout_ms) for rank in range(number)]


def state(transceiver: Any) -> dict[str, Any]:
    return dict(transceiver.status_dump()["ranks"])


def all_say(made: list[Any], words: str) -> list[HandshakeError]:
    assert all(isinstance(each, HandshakeError) and words in str(each) for each in made), made
    return made


def test_ranks_that_meet_know_one_another(start):
    made = start(*ranks(4, tensor=2, pipeline=2))
    worlds = [each._shared.world for each in made]
    assert [world.rank for world in worlds] == [0, 1, 2, 3]
    assert {world.name for world in worlds} == {(made[0]._shared.instance, made[0]._shared.incarnation)}
    assert {tuple(member.endpoint for member in world.members) for world in worlds} == {
        tuple(each.endpoint for each in made)
    }
    assert len({world.token(7, b"digest") for world in worlds}) == 1
    assert worlds[0].token(7, b"digest") != worlds[0].token(8, b"digest")
    assert list(worlds[3].layouts) == [each._manager.layout for each in made]
    assert [state(each)["state"] for each in made] == ["complete"] * 4


def test_rank_0_may_come_last(start):
    specs = ranks(3)
    late = [specs[1], specs[2], specs[0]]
    made = start(*late, rank2={"bind": "tcp://127.0.0.1:0"})
    assert [state(each)["rank"] for each in made] == [1, 2, 0]


def test_one_rank_needs_nobody(start):
    (alone,) = start(RankSpec(0, Topology(), "tcp://127.0.0.1:0"))
    assert state(alone) == {
        "rank": 0,
        "size": 1,
        "state": "complete",
        "error": "",
        "missing": [],
        "heard_seconds_ago": {},
    }


def test_a_rank_that_never_joins_is_named_on_every_rank(start):
    started = time.monotonic()
    specs = ranks(4, join_timeout_ms=1500)
    for error in all_say(start(*specs[:2], specs[3]), "rank 2 of 4 did not join within 1.5 s"):
        assert error.fields["missing"][0] == [2]
    assert time.monotonic() - started < 15


def test_rank_0_that_never_comes_is_named_too(start):
    specs = ranks(3, join_timeout_ms=1000)
    all_say(start(*specs[1:]), "rank 0 of 3 did not join within 1 s: rank 0 is expected at tcp://127.0.0.1:")


def test_two_ranks_with_one_id_are_an_error_on_every_rank(start):
    specs = ranks(3)
    all_say(start(specs[0], specs[1], specs[1]), "two processes are rank 1: one at tcp://127.0.0.1:")


def test_two_processes_that_are_rank_0_cannot_both_bind(start):
    specs = ranks(2, join_timeout_ms=1000)
    made = start(specs[0], specs[0])
    assert {type(each) for each in made} == {HandshakeError, ConfigError}


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"topology": Topology(tensor=4)}, {}, "topology: (2, 1, 1) at rank 0, (4, 1, 1) there"),
        ({"topology": Topology(pipeline=2)}, {}, "topology: (2, 1, 1) at rank 0, (1, 2, 1) there"),
        ({"data_rank": 1}, {}, "data_rank: 0 at rank 0, 1 there"),
        ({"rank": 2}, {}, "rank: '0 … 1' at rank 0, 2 there"),
        ({}, {"role": Role.GENERATION}, "role: 'context' at rank 0, 'generation' there"),
        ({}, {"model": {**SMALL_MODEL, "weights": "other"}}, "model.weights: 'w0' at rank 0, 'other' there"),
    ],
    ids=["world size", "topology", "data rank", "rank", "role", "weights"],
)
def test_a_rank_of_another_kind_is_an_error_on_every_rank_with_the_field(start, changes, options, words):
    first, second = ranks(2)
    made = start(first, replace(second, **changes), rank1=options)
    for error in all_say(made, words):
        assert set(error.fields) == {words.split(":")[0]}
        assert "cannot join" in str(error)


def test_a_rank_that_comes_when_all_are_there_is_turned_away_alone(start):
    specs = ranks(2)
    made = start(*specs)
    (late,) = start(specs[1])
    assert "restart all ranks of the instance together" in str(late)
    assert [state(each)["state"] for each in made] == ["complete"] * 2


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_ends_ends_the_instance_on_every_rank(start, gone):
    made = start(*ranks(3))
    made[gone].shutdown()
    for each in made[:gone] + made[gone + 1 :]:
        wait_until(lambda each=each: state(each)["state"] == "lost")
        dump = each.status_dump()
        assert f"rank {gone} of this instance is lost: it is shutting down" in dump["ranks"]["error"]
        assert not dump["ready"]
        with pytest.raises(PeerLostError, match=f"rank {gone} of this instance is lost"):
            each.prepare_context_requests([TransferRequest(1, (1, 2, 3))])


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_whose_connections_end_or_that_is_silent_is_lost(start, gone):
    made = start(*ranks(3))
    for each in made:
        shared = each._shared
        shared.clocks = replace(shared.clocks, ping=0.1, rank_silence=1.0)
    made[gone]._loop.ranks.leave = lambda: None  # as one that is killed, which says nothing
    made[gone].shutdown()
    for each in made[:gone] + made[gone + 1 :]:
        wait_until(lambda each=each: state(each)["state"] == "lost")
        assert f"rank {gone} of this instance is lost" in state(each)["error"]


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
