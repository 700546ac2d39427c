import time

import pytest
from faults.harness import (
    ADMISSION_SECONDS,
    ROUNDS,
    TRANSFER_SECONDS,
    Cast,
    end_of,
    hand_over,
    is_drained,
    kill,
    prepare,
    until,
    wait_for_partial,
)

from kvferry.bench.processes import Child

LOST = ("PeerLostError", "TransferTimeoutError")


def survives(cast: Cast, context: Child, healthy: Child, free_before: int) -> None:
    """The context worker keeps serving, its ledger drains, and no block is missing."""
    until(lambda: is_drained(context), seconds=10, what="an empty ledger")
    healthy.ask("free", request=hand_over(cast, context, healthy))
    until(lambda: is_drained(context), seconds=5, what="an empty ledger")
    assert context.ask("statistics")["free"] == free_before


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_context_worker_survives_its_generation_workers_death(cast: Cast, moment: str) -> None:
    context, healthy = cast.start("context"), cast.start("generation")
    free_before = context.ask("statistics")["free"]
    counted = 0
    for _ in range(4 * ROUNDS):
        generation = cast.start("generation")
        request, params = prepare(cast, context, generation)
        generation.ask("receive", request=request, **params)
        if moment != "before":
            context.ask("respond", request=request)
        if moment == "during" and not wait_for_partial(context, request, where="sends"):
            end_of(context, request, seconds=5)
            context.ask("free", request=request)
            kill(generation)
            continue
        if moment == "after":
            assert end_of(generation, request, seconds=10)["outcome"] == "completed"
        kill(generation)
        killed = time.monotonic()
        if moment == "before":
            context.ask("respond", request=request)
        deadline = max(TRANSFER_SECONDS, ADMISSION_SECONDS)
        outcome = end_of(context, request, seconds=deadline + 1)
        assert outcome["outcome"] == "completed" if moment == "after" else outcome["error"] in LOST, outcome
        assert time.monotonic() - killed < deadline + 1
        context.ask("free", request=request)
        survives(cast, context, healthy, free_before)
        counted += 1
        if counted == ROUNDS:
            break
    assert counted == ROUNDS, f"only {counted} rounds hit the moment {moment!r}"
