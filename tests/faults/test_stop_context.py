import signal
import time

import pytest
from faults.harness import (
    ATTEMPTS,
    BLOCKS,
    LOST,
    ROUNDS,
    TRANSFER_SECONDS,
    Cast,
    end_of,
    hand_over,
    is_drained,
    kill,
    over_tcp,
    prepare,
    until,
    use_every_block,
    wait_for_partial,
)

from kvferry.bench.processes import Child

LATER_REQUESTS = 6


def quarantined(worker: Child) -> int:
    return int(worker.ask("status")["ledger"]["blocks"]["quarantine"])


def stop(cast: Cast, fate: str) -> bool:
    """Stop a writer in mid-write, and serve others meanwhile; False if it had written everything before it stopped."""
    generation, healthy = cast.lasting("generation"), cast.lasting("context")
    context = cast.start("context")
    request, params = prepare(cast, context, generation)
    generation.ask("receive", request=request, **params)
    context.ask("respond", request=request)
    partial = wait_for_partial(context, request)
    context.signal(signal.SIGSTOP)
    outcome = end_of(generation, request, seconds=TRANSFER_SECONDS + 1)
    if not partial or outcome["outcome"] == "completed":
        kill(context)
        generation.ask("free", request=request)
        return False
    assert outcome["error"] in LOST, outcome
    in_time = generation.ask("wrong_blocks", request=request, seed=request)["wrong"] > 0
    generation.ask("free", request=request)
    cast.expect("context")
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
    use_every_block(cast, healthy, generation)
    statistics = generation.ask("statistics")
    assert statistics["free"] == statistics["total"]
    kill(context)
    return in_time


def run(cast: Cast, fate: str) -> None:
    counted = 0
    for _ in range(ATTEMPTS):
        counted += stop(cast, fate)
        if counted == ROUNDS:
            break
    assert counted == ROUNDS, f"only {counted} rounds stopped the writer in mid-write"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fate", ["continues", "is killed"])
def test_no_byte_of_a_later_request_changes_when_a_stopped_writer(cast: Cast, fate: str) -> None:
    run(cast, fate)


@over_tcp
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fate", ["continues", "is killed"])
def test_no_byte_in_a_socket_changes_a_later_request_when_a_stopped_writer(cast: Cast, fate: str) -> None:
    run(cast, fate)
