import pytest
from faults.deaths import SURVIVOR_OF
from faults.harness import ATTEMPTS, ROLES, ROUNDS, Cast, end_of, prepare, survives, wait_for_partial

END_SECONDS = 30
"""More than the three waits of a shutdown together."""


def end(cast: Cast, role: str) -> bool:
    """End a worker in mid-write, as an operator does; False if the write was over before that."""
    ending, other = cast.start(role), cast.lasting(SURVIVOR_OF[role])
    context, generation = (ending, other) if role == "context" else (other, ending)
    request, params = prepare(cast, context, generation)
    generation.ask("receive", request=request, **params)
    context.ask("respond", request=request)
    partial = wait_for_partial(context, request)
    assert ending.process.stdin is not None
    ending.process.stdin.close()
    outcome = end_of(other, request, seconds=5)["outcome"]
    assert ending.process.wait(END_SECONDS) == 0
    other.ask("free", request=request)
    cast.expect(role)
    survives(cast, other, cast.lasting("context"), cast.lasting("generation"))
    return partial and outcome == ("failed" if role == "context" else "cancelled")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("role", ROLES)
def test_a_worker_that_is_told_to_end_in_mid_write_ends_well_and_tells_its_peer(cast: Cast, role: str) -> None:
    counted = 0
    for _ in range(ATTEMPTS):
        counted += end(cast, role)
        if counted == ROUNDS:
            break
    assert counted == ROUNDS, f"only {counted} rounds ended a worker in mid-write"
