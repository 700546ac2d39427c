from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.deaths import kill_and_survive
from faults.harness import (
    BLOCKS,
    NOT_MAPPED,
    ROLES,
    Cast,
    Pairing,
    end_of,
    hand_over,
    is_drained,
    prepare,
    survives,
    until,
    wait_for_partial,
)

from kvferry.bench.processes import Child

PYTHON_NIXL, CPP_NIXL, CPP_UCX = Pairing("PYTHON", "NIXL"), Pairing("CPP", "NIXL"), Pairing("CPP", "UCX")
MIXED = {"CPP to PYTHON": (CPP_NIXL, PYTHON_NIXL), "PYTHON to CPP": (PYTHON_NIXL, CPP_NIXL)}
NOT_SHARED = Pairing("CPP", "UCX", "unshared", NOT_MAPPED)
ONE_SHARES = {"only the target shares": (NOT_SHARED, CPP_UCX), "only the writer shares": (CPP_UCX, NOT_SHARED)}
REFUSED = {
    "UCX to NIXL": (CPP_UCX, CPP_NIXL),
    "NIXL of another runtime to UCX": (PYTHON_NIXL, CPP_UCX),
}


@pytest.fixture(scope="module", params=MIXED.values(), ids=list(MIXED))
def company(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    cast = Cast(dict(zip(ROLES, request.param, strict=True)), tmp_path_factory.mktemp("settings"))
    yield cast
    cast.close()


@pytest.fixture
def cast(company: Cast) -> Iterator[Cast]:
    with company.act():
        yield company


def test_the_two_runtimes_hand_over_to_each_other_by_value_and_warn_of_nothing(cast: Cast) -> None:
    context, generation = cast.lasting("context"), cast.lasting("generation")
    for blocks in (1, 64, BLOCKS):
        generation.ask("free", request=hand_over(cast, context, generation, blocks=blocks))
    for worker in (context, generation):
        (peer,) = worker.ask("status")["peers"]
        assert (peer["state"], peer["warnings"]) == ("ready", [])


def cancel_in_mid_write(cast: Cast, by: str) -> bool:
    """Whether both sides took it for cancelled: on a machine that paused here, the write may have been over."""
    context, generation = cast.lasting("context"), cast.lasting("generation")
    request, params = prepare(cast, context, generation)
    generation.ask("receive", request=request, **params)
    context.ask("respond", request=request)
    if wait_for_partial(context, request):
        cast.lasting(by).ask("cancel", request=request)
    outcomes = {end_of(worker, request, seconds=3)["outcome"] for worker in (context, generation)}
    for worker in (context, generation):
        until(lambda worker=worker: is_drained(worker), seconds=2, what="an empty ledger")
        worker.ask("free", request=request)
    return outcomes == {"cancelled"}


@pytest.mark.parametrize("by", ROLES)
def test_a_cancellation_in_mid_write_is_prompt_and_leaves_nothing_behind(cast: Cast, by: str) -> None:
    assert any(cancel_in_mid_write(cast, by) for _ in range(10))
    survives(cast, cast.lasting(by), cast.lasting("context"), cast.lasting("generation"))


@pytest.mark.parametrize("victim", ROLES)
def test_either_survives_the_death_of_the_other_in_mid_write(cast: Cast, victim: str) -> None:
    kill_and_survive(cast, victim, "during")


def pools_mapped(worker: Child) -> int:
    lines = Path(f"/proc/{worker.process.pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "/memfd:kvferry-pool" in line})


@pytest.mark.parametrize("pairings", ONE_SHARES.values(), ids=list(ONE_SHARES))
def test_where_only_one_shares_its_memory_the_bytes_go_by_the_transport(pairings, tmp_path) -> None:
    with Cast(dict(zip(ROLES, pairings, strict=True)), tmp_path).act() as cast:
        context, generation = (cast.start(role, blocks=1024) for role in ROLES)
        for blocks in (1, 64, 1024):
            generation.ask("free", request=hand_over(cast, context, generation, blocks=blocks))
        for worker in (context, generation):
            (peer,) = worker.ask("status")["peers"]
            assert (peer["state"], peer["warnings"]) == ("ready", [])
        assert context.ask("status")["peers"][0]["route"].startswith("ucx")
        for worker, pairing in zip((context, generation), pairings, strict=True):
            assert pools_mapped(worker) == (pairing is CPP_UCX)  # its own, if any


@pytest.mark.parametrize("pairings", REFUSED.values(), ids=list(REFUSED))
def test_another_backend_is_refused_at_the_handshake_with_both_names(pairings, tmp_path) -> None:
    refused = Cast(dict(zip(ROLES, pairings, strict=True)), tmp_path)
    with refused.act():
        context, generation = (refused.start(role, blocks=8) for role in ROLES)
        request, params = prepare(refused, context, generation, blocks=8)
        context.ask("respond", request=request)
        generation.ask("receive", request=request, **params)
        outcome = end_of(generation, request, seconds=5)
        assert outcome["error"] == "HandshakeError"
        ours, theirs = (pairing.backend for pairing in reversed(pairings))
        assert f"backend: {ours!r} here, {theirs!r} there" in outcome["message"]
        assert is_drained(generation)
        assert generation.ask("wrong_blocks", request=request, seed=request)["wrong"] == 8
        assert "handshakes" not in context.ask("status")["counters"]
        context.ask("cancel", request=request)
        until(lambda: is_drained(context), seconds=2, what="an empty ledger")
