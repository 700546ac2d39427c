"""Checks of rest: the wake-up descriptor, an idle agent, and what agents leave behind."""

import time
from itertools import pairwise

import numpy as np

from kvferry_plugins.testing.conformance.agent_suite import AgentSuite, Pair, Progress, Side, Workers, until

IDLE_SHARE = 0.05
"""Of one processor, which a process with an idle agent may take, in the best of some tries."""

CYCLES = 6
LEAKED_BYTES = 24 << 20
"""By which a process's resident memory may grow in all cycles: an allocator keeps some."""

ALLOCATED_BYTES = 1 << 20
"""The same of what malloc has given out."""

BATCHES, TRANSFERS, SEGMENTS = 3, 40, 256
KEPT_BYTES = 96 << 10
"""By which it may grow in the best of some batches of transfers: half of what their addresses take."""


class IdleChecks(AgentSuite):
    """What an agent does while there is nothing to do."""

    def test_the_wake_up_descriptor_wakes_whoever_sleeps_on_it(self, pair: Pair) -> None:
        if not self.has_wakeup:
            assert pair.writer.facts()["wakeup_fd"] is None, (
                "has_wakeup = False was declared, and wakeup_fd gives a descriptor"
            )
            return
        first, again = (pair.writer.facts()["wakeup_fd"] for _ in range(2))
        assert isinstance(first, int), (
            "wakeup_fd gives no descriptor: declare has_wakeup = False, if the transport has none"
        )
        assert first == again, f"wakeup_fd gives {first} and then {again}: it is one descriptor for the agent's life"
        for side in (pair.writer, pair.target):
            side.set_progress(Progress.WOKEN)
        for transfer in (pair.write_all(), pair.write([1], [1], [1])):
            found = pair.outcome_within(transfer, self.patience)
            assert found is not None, (
                "a worker that polls only when wakeup_fd is readable never heard of its transfer's end: the descriptor "
                "must turn readable when poll has work, at the writer and at the target"
            )
            assert found.ok, f"a transfer between agents that sleep on their descriptors failed: {found.error}"

    def test_the_wake_up_descriptor_rests_when_there_is_nothing_to_do(self, pair: Pair) -> None:
        pair.arrives(pair.write_all())
        for side in (pair.writer, pair.target):
            side.set_progress(Progress.STILL)
            until(
                lambda side=side: not _polled_is_readable(side),  # type: ignore[misc]
                self.patience,
                f"the wake-up descriptor of {side.name} is readable after every poll, although nothing is under way: "
                "a worker that sleeps on it would spin",
            )

    def test_an_idle_agent_uses_no_processor(self, pair: Pair) -> None:
        pair.arrives(pair.write_all())
        for side in (pair.writer, pair.target):
            side.set_active(False)
            side.set_progress(Progress.STILL)
        for side in (pair.writer, pair.target):
            share = min(self._shares(side))
            assert share <= IDLE_SHARE, (
                f"{side.name} has nothing to do and takes {share:.0%} of a processor: a thread spins; "
                f"threads of Python's: {side.thread_names()}"
            )

    def _shares(self, side: Side) -> list[float]:
        shares = [1.0]
        while len(shares) < 6 and shares[-1] > IDLE_SHARE:
            shares.append(side.processor_share(0.3))
        return shares

    def test_being_told_of_activity_changes_no_outcome(self, pair: Pair) -> None:
        for active in (True, True, False, False, True):
            pair.target.set_active(active)
            pair.arrives(pair.write([0], [0], [4096])) if active else pair.step_for(0.02)
        pair.still_works()

    # --- leaks --------------------------------------------------------------------------------------------------

    def test_agents_that_come_and_go_leave_nothing_behind(self, workers: Workers) -> None:
        for _ in range(2):
            self._one_life(workers)
        sides = workers.sides("kit-writer", "kit-target")
        before = [side.holdings() for side in sides]
        links = [side.open_descriptors() for side in sides]
        for _ in range(CYCLES):
            self._one_life(workers)
        for side, held, linked in zip(sides, before, links, strict=True):
            deadline = time.monotonic() + self.patience / 4
            while (grown := _growth(held, side.holdings())) and time.monotonic() < deadline:
                time.sleep(0.05)
            kept = side.open_descriptors()
            news = [each for each in set(kept) if kept.count(each) > linked.count(each)]
            assert not grown, (
                f"after {CYCLES} agents were made, used and closed, {side.name} holds more: {grown}; new descriptors "
                f"lead to {sorted(news)}, Python's threads are {side.thread_names()}: close must release everything"
            )

    def _one_life(self, workers: Workers) -> None:
        with self.joined(workers, lasting=not self.agents_come_and_go) as pair:
            pair.writer.register_again(4, 4096)
            pair.arrives(pair.write_all())

    def test_transfers_that_are_over_leave_nothing_behind(self, pair: Pair) -> None:
        offsets = np.arange(SEGMENTS, dtype=np.int64) * 512
        sizes = np.full(SEGMENTS, 300, dtype=np.int64)
        sides = (pair.writer, pair.target)
        held = []
        for _ in range(BATCHES + 1):
            pair.write_repeatedly(offsets, offsets, sizes, TRANSFERS)
            held.append([side.holdings()["allocated"] for side in sides])
        for side, series in zip(sides, zip(*held, strict=True), strict=True):
            grown = [after - before for before, after in pairwise(series)]
            assert min(grown) <= KEPT_BYTES, (
                f"the memory of {side.name} grew by {[each >> 10 for each in grown]} KiB in {BATCHES} batches of "
                f"{TRANSFERS} transfers that are over: something of each is kept"
            )


def _polled_is_readable(side: Side) -> bool:
    side.poll()
    return bool(side.is_readable())


def _growth(before: dict[str, int], after: dict[str, int]) -> dict[str, str]:
    grown = {key: after[key] - before[key] for key in before}
    kept = {key: f"{grown[key]:+d}" for key in ("descriptors", "threads") if grown[key] > 0}
    if grown["bytes"] > LEAKED_BYTES:
        kept["memory"] = f"{grown['bytes'] >> 20:+d} MiB"
    if grown["allocated"] > ALLOCATED_BYTES:
        kept["allocated memory"] = f"{grown['allocated'] >> 20:+d} MiB"
    return kept
