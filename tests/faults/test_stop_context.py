import signal
import time

import pytest
from faults.harness import (
    ATTEMPTS,
    BLOCKS,
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

LATER_REQUESTS = 6


def quarantined(worker: Child) -> int:
    return int(worker.ask("status")["ledger"]["blocks"]["quarantine"])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fate", ["continues", "is killed"])
def test_no_byte_of_a_later_request_changes_when_a_stopped_writer(cast: Cast, fate: str) -> None:
    generation, healthy = cast.start("generation"), cast.start("context")
    free_before = generation.ask("statistics")["free"]
    counted = 0
    for _ in range(ATTEMPTS):
        context = cast.start("context")
        request, params = prepare(cast, context, generation)
        generation.ask("receive", request=request, **params)
        context.ask("respond", request=request)
        partial = wait_for_partial(context, request)
        context.signal(signal.SIGSTOP)
        outcome = end_of(generation, request, seconds=TRANSFER_SECONDS + 1)
        generation.ask("free", request=request)
        if not partial or outcome["outcome"] == "completed":
            kill(context)
            continue
        assert outcome["error"] in ("PeerLostError", "TransferTimeoutError"), outcome
        assert quarantined(generation) == BLOCKS
        later = [hand_over(cast, healthy, generation) for _ in range(LATER_REQUESTS)]
        if fate == "continues":
            context.signal(signal.SIGCONT)
        else:
            kill(context)
        until(lambda: is_drained(generation), seconds=10, what="the quarantine to end")
        time.sleep(0.05)
        for number in later:
            assert generation.ask("wrong_blocks", request=number, seed=number)["wrong"] == 0
            generation.ask("free", request=number)
        reused = hand_over(cast, healthy, generation, blocks=BLOCKS)
        generation.ask("free", request=reused)
        assert generation.ask("statistics")["free"] == free_before
        kill(context)
        counted += 1
        if counted == ROUNDS:
            break
    assert counted == ROUNDS, f"only {counted} rounds stopped the writer in mid-write"
