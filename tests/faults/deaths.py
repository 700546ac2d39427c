"""A worker's death in the middle of a hand-off, and what its peer makes of it."""

import signal
import time
from pathlib import Path
from typing import Any

from faults.harness import (
    ADMISSION_SECONDS,
    ATTEMPTS,
    LOST,
    ROUNDS,
    TRANSFER_SECONDS,
    Cast,
    end_of,
    is_partial,
    kill,
    prepare,
    survives,
    wait_for_partial,
)

from kvferry.bench.processes import Child

SURVIVOR_OF = {"context": "generation", "generation": "context"}


SLACK_SECONDS = 5.0

LEFT_OVERS = 8
"""What a survivor may hold more after its last round than after its first: connections that are being closed."""


def holdings(worker: Child) -> int:
    """Descriptors of a process, and pools of other processes that it has mapped."""
    process = Path(f"/proc/{worker.process.pid}")
    mapped = [line for line in (process / "maps").read_text().splitlines() if "/memfd:" in line]
    return len(list((process / "fd").iterdir())) + len(mapped)


def is_in_the_write(survivor: Child, victim: str, request: int) -> bool:
    """Whether a kill met some bytes written and some not, as the survivor sees it."""
    if victim == "generation":
        return is_partial(survivor, request)
    return bool(survivor.ask("wrong_blocks", request=request, seed=request)["wrong"])


def tells_of_a_death(outcome: dict[str, Any], victim: str) -> bool:
    """Whether a survivor's outcome is the one that a peer's death should have.

    A target that was killed is not gone yet: on a busy machine the writer hears of the failed write long before that.
    """
    failed_write = victim == "generation" and str(outcome["message"]).startswith("a write of")
    return outcome["error"] in LOST or failed_write


def allowed_seconds(victim: str, moment: str) -> float:
    """From a death to the survivor's outcome: the clock that runs then, and what a busy machine needs."""
    if victim == "generation":  # another attempt may come within the lease
        return max(TRANSFER_SECONDS, ADMISSION_SECONDS) + SLACK_SECONDS
    return {"before": ADMISSION_SECONDS, "during": TRANSFER_SECONDS, "after": 0}[moment] + SLACK_SECONDS


def die(cast: Cast, victim: str, moment: str) -> bool:
    """Kill a worker in the middle of a hand-off with one that must survive it; False if the moment was missed."""
    dying, survivor = cast.start(victim), cast.lasting(SURVIVOR_OF[victim])
    context, generation = (dying, survivor) if victim == "context" else (survivor, dying)
    request, params = prepare(cast, context, generation)
    generation.ask("receive", request=request, **params)
    if moment != "before":
        context.ask("respond", request=request)
    in_time = moment != "during" or wait_for_partial(context, request)
    if moment == "after":
        assert end_of(generation, request, seconds=10)["outcome"] == "completed"
    killed = time.monotonic()
    dying.signal(signal.SIGKILL)
    if moment == "during":
        in_time = in_time and is_in_the_write(survivor, victim, request)
    kill(dying)
    cast.expect(victim)
    if (victim, moment) == ("generation", "before"):
        context.ask("respond", request=request)
    if (victim, moment) == ("context", "after"):
        assert generation.ask("wrong_blocks", request=request, seed=request)["wrong"] == 0
    else:
        outcome = end_of(survivor, request, seconds=allowed_seconds(victim, moment))
        # after the write its acknowledgement may have died with the process
        may_succeed = not in_time or moment == "after"
        assert tells_of_a_death(outcome, victim) or (may_succeed and outcome["outcome"] == "completed"), outcome
        assert time.monotonic() - killed < allowed_seconds(victim, moment)
    survivor.ask("free", request=request)
    return in_time


def kill_and_survive(cast: Cast, victim: str, moment: str) -> None:
    """Let as many workers of a role die as there are rounds, each in the midst of a hand-off to one that lasts."""
    context, generation = cast.lasting("context"), cast.lasting("generation")
    survivor, counted, holds = cast.lasting(SURVIVOR_OF[victim]), 0, list[int]()
    for _ in range(ATTEMPTS):
        counted += die(cast, victim, moment)
        survives(cast, survivor, context, generation)
        holds.append(holdings(survivor))
        if counted == ROUNDS:
            break
    kept = cast.kept_of_the_dead(SURVIVOR_OF[victim]) * len(holds)
    assert holds[-1] < holds[0] + LEFT_OVERS + kept, f"a death leaves something open: {holds}"
    assert counted == ROUNDS, f"only {counted} rounds hit the moment {moment!r}"
