"""MPI's workers are one world: whoever dies in it is not replaced, and takes nobody along."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults.deaths import SURVIVOR_OF, die
from faults.harness import (
    ATTEMPTS,
    BLOCKS,
    LOST,
    NOT_MAPPED,
    ROLES,
    ROUNDS,
    TRANSFER_SECONDS,
    Cast,
    Pairing,
    compare_each,
    end_of,
    is_drained,
    kill,
    prepare,
    until,
    use_every_block,
    wait_for_partial,
)

from kvferry.bench.processes import Child, start_together
from kvferry_backends.mpi_launch import launch

END_SECONDS = 30
"""From the request to end to the survivor's end, in a world that has lost one."""


class OneWorld(Cast):
    """A cast of two that start and end together."""

    def __init__(self, settings: Path) -> None:
        super().__init__(dict.fromkeys(ROLES, Pairing("CPP", "MPI", config=NOT_MAPPED)), settings)
        self._world = ExitStack()
        self._workers: dict[str, Child] = {}

    def start(self, role: str, **options: Any) -> Child:
        """Begin another world, and return its worker of a role; ``lasting`` is the other one."""
        self.close()
        orders = [self.order(each, **options) for each in ROLES]
        workers = self._world.enter_context(start_together(launch, orders, environ=self.environ(role)))
        for worker in workers:
            assert worker.answer(timeout=60)["ready"]
        self._workers = dict(zip(ROLES, workers, strict=True))
        return self._workers[role]

    def expect(self, role: str) -> None:
        """None can come: a world is whole from its beginning."""

    def lasting(self, role: str) -> Child:
        return self._workers[role]

    def close(self) -> None:
        self._world.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[OneWorld]:
    cast = OneWorld(tmp_path)
    yield cast
    cast.close()


def loses_nothing(survivor: Child) -> None:
    """Every block comes back, and it ends well when it is told to, in bounded time."""
    until(lambda: is_drained(survivor), seconds=10, what="an empty ledger")
    statistics = survivor.ask("statistics")
    assert statistics["free"] == statistics["total"]
    assert survivor.process.stdin is not None
    survivor.process.stdin.close()
    assert survivor.process.wait(END_SECONDS) == 0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("victim", ROLES)
def test_a_workers_death_is_named_and_its_mate_goes_on_and_ends_well(
    world: OneWorld, victim: str, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    counted = 0
    for _ in range(ATTEMPTS):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvferry.launch.together"):
            counted += die(world, victim, moment)
            loses_nothing(world.lasting(SURVIVOR_OF[victim]))
        messages = [record.getMessage() for record in caplog.records]
        (named,) = (message for message in messages if "the launcher" not in message)
        assert named.startswith(f"{victim} worker on CPP-MPI (")
        assert "SIGKILL" in named
        if counted == ROUNDS:
            break
    assert counted == ROUNDS, f"only {counted} rounds hit the moment {moment!r}"


def stop(world: OneWorld, fate: str) -> bool:
    """Stop a writer in mid-write; False if it had written everything before it stopped."""
    context = world.start("context")
    generation = world.lasting("generation")
    request, params = prepare(world, context, generation)
    generation.ask("receive", request=request, **params)
    context.ask("respond", request=request)
    partial = wait_for_partial(context, request)
    context.signal(signal.SIGSTOP)
    try:
        outcome = end_of(generation, request, seconds=TRANSFER_SECONDS + 1)
        if not partial or outcome["outcome"] == "completed":
            return False
        assert outcome["error"] in LOST, outcome
        assert generation.ask("status")["ledger"]["blocks"]["quarantine"] == BLOCKS
        generation.ask("free", request=request)
    finally:
        kill(context) if fate == "is killed" else context.signal(signal.SIGCONT)
    until(lambda: is_drained(generation), seconds=10, what="the quarantine to end")
    if fate == "continues":
        assert end_of(context, request, seconds=5)["outcome"] != "completed"
        context.ask("free", request=request)
        use_every_block(world, context, generation)
        time.sleep(0.05)
    return True


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fate", ["continues", "is killed"])
def test_blocks_stay_in_quarantine_until_a_stopped_writer(world: OneWorld, fate: str) -> None:
    counted = 0
    for _ in range(ATTEMPTS):
        counted += stop(world, fate)
        if counted == ROUNDS:
            break
    assert counted == ROUNDS, f"only {counted} rounds stopped the writer in mid-write"


def test_the_bytes_are_there_whenever_a_hand_off_is_said_to_be_complete(world: OneWorld) -> None:
    context = world.start("context", blocks=64, kv_transfer_checksum=False)
    compare_each(world, context, world.lasting("generation"))
