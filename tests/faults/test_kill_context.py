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
def test_a_generation_worker_survives_its_context_workers_death(cast: Cast, moment: str) -> None:
    generation, healthy = cast.start("generation"), cast.start("context")
    free_before = generation.ask("statistics")["free"]
    counted = 0
    for _ in range(ATTEMPTS):
        context = cast.start("context")
        request, params = prepare(cast, context, generation)
        generation.ask("receive", request=request, **params)
        if moment != "before":
            context.ask("respond", request=request)
        if moment == "during" and not wait_for_partial(context, request):
            end_of(generation, request, seconds=5)
            generation.ask("free", request=request)
            kill(context)
            continue
        if moment == "after":
            assert end_of(generation, request, seconds=10)["outcome"] == "completed"
        killed = time.monotonic()
        kill(context)
        if moment != "after":
            deadline = TRANSFER_SECONDS if moment == "during" else ADMISSION_SECONDS
            outcome = end_of(generation, request, seconds=deadline + 1)
            assert outcome["error"] in LOST, outcome
            assert time.monotonic() - killed < deadline + 1
        else:
            assert generation.ask("wrong_blocks", request=request, seed=request)["wrong"] == 0
        generation.ask("free", request=request)
        survives(cast, generation, healthy, generation, free_before=free_before)
        counted += 1
        if counted == ROUNDS:
            break
    assert counted == ROUNDS, f"only {counted} rounds hit the moment {moment!r}"
