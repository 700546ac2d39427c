import time

import pytest
from faults.harness import (
    ADMISSION_SECONDS,
    ATTEMPTS,
    LOST,
    ROUNDS,
    TRANSFER_SECONDS,
    Cast,
    end_of,
    kill,
    prepare,
    survives,
    wait_for_partial,
)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_a_context_worker_survives_its_generation_workers_death(cast: Cast, moment: str) -> None:
    context, healthy = cast.start("context"), cast.start("generation")
    free_before = context.ask("statistics")["free"]
    counted = 0
    for _ in range(ATTEMPTS):
        generation = cast.start("generation")
        request, params = prepare(cast, context, generation)
        generation.ask("receive", request=request, **params)
        if moment != "before":
            context.ask("respond", request=request)
        if moment == "during" and not wait_for_partial(context, request):
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
        # "after" the write its acknowledgement may have died with the process
        is_fine = outcome["error"] in LOST or (moment == "after" and outcome["outcome"] == "completed")
        assert is_fine, outcome
        assert time.monotonic() - killed < deadline + 1
        context.ask("free", request=request)
        survives(cast, context, context, healthy, free_before=free_before)
        counted += 1
        if counted == ROUNDS:
            break
    assert counted == ROUNDS, f"only {counted} rounds hit the moment {moment!r}"
