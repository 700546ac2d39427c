"""``kvferry bench gil``: what a Python thread that spins in the sender's process costs, against one in another process.

Both take a core; only the first takes the interpreter's lock from the sender. The control is a thread of the sender's
process that takes a core and no lock: what it costs against the other process is the scheduler's, not the lock's.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from kvferry.bench.measurement import Series
from kvferry.bench.pair import Pair, Workers, completed, workers
from kvferry.bench.pairings import Pairing
from kvferry.bench.processes import Child

HERE, ELSEWHERE, CONTROL = "same process", "other process", "same process, no lock"
PLACES = (HERE, ELSEWHERE, CONTROL)
"""Where the spinner is: the sender's process, or one of its own; and whether it wants the interpreter's lock."""

STREAM, SINGLE = "stream", "single"

_TABLES_SECONDS = 0.05
"""For the generation side's first TABLEs to arrive: what is timed begins with the sender."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured.

    Attributes:
        nbytes: of one hand-off.
        blocks: of one hand-off.
        hand_offs: of one stream; they take turns with the blocks of as many as are in flight, and one more.
        window: hand-offs in flight at a time.
        rounds: that count; one more warms up.
    """

    pairing: Pairing
    nbytes: int
    blocks: int
    hand_offs: int
    window: int
    rounds: int

    @property
    def slots(self) -> int:
        """Hand-offs that have blocks of their own."""
        return min(self.window + 1, self.hand_offs)


@dataclass(slots=True)
class Measurement:
    """What one run found."""

    plan: Plan
    series: Mapping[str, Mapping[str, Series]] = field(
        default_factory=lambda: {kind: {place: Series() for place in PLACES} for kind in (STREAM, SINGLE)}
    )
    """``stream`` or ``single`` → place of the spinner → seconds."""

    def ratio(self, kind: str, to: str = ELSEWHERE) -> float:
        """Throughput with the spinner in the sender's process ÷ with it at ``to``."""
        return self.series[kind][to].median / self.series[kind][HERE].median

    def rate(self, kind: str, place: str) -> float:
        """GB/s, 10⁹ bytes."""
        hand_offs = self.plan.hand_offs if kind == STREAM else 1
        return hand_offs * self.plan.nbytes / self.series[kind][place].median / 1e9

    def to_json(self) -> dict[str, Any]:
        """Plain values: seconds, GB/s and ratios."""
        plan = self.plan
        kinds = {
            kind: {
                "gigabytes_per_second": {place: self.rate(kind, place) for place in PLACES},
                "median_seconds": {place: series.median for place, series in places.items()},
                "ratio": self.ratio(kind),
                "ratio_to_control": self.ratio(kind, CONTROL),
            }
            for kind, places in self.series.items()
        }
        return {
            "backend": plan.pairing.backend,
            "runtime": plan.pairing.runtime,
            "shared_memory": plan.pairing.shared_memory,
            "bytes": plan.nbytes,
            "blocks": plan.blocks,
            "hand_offs": plan.hand_offs,
            "window": plan.window,
            "rounds": plan.rounds,
            **kinds,
        }


def measure(plan: Plan, progress: Callable[[str], None]) -> Measurement:
    """Measure streams and single hand-offs beside each spinner in turn.

    Raises:
        ChildError: a process failed; a hand-off failed or arrived wrong.
    """
    progress(f"{plan.pairing}: starting workers")
    found = Measurement(plan)
    pools = workers(plan.pairing, blocks=plan.slots * plan.blocks, block_bytes=plan.nbytes // plan.blocks)
    with pools as sides, Child("kvferry.bench.spinner", name="spinner") as spinner:
        stream = _Stream(sides, plan)
        spinners = {HERE: sides.context, ELSEWHERE: spinner, CONTROL: sides.context}
        for number in range(plan.rounds + 1):
            progress(f"round {number} of {plan.rounds}" if number else "warming up")
            for kind, count in ((STREAM, plan.hand_offs), (SINGLE, 1)):
                for place, child in spinners.items():
                    seconds = stream.run(count, child, locked=place != CONTROL)
                    if number:
                        found.series[kind][place].seconds.append(seconds)
        stream.compare()
    return found


class _Stream:
    """Many hand-offs between two workers, over the blocks of a few requests that are never handed off themselves."""

    def __init__(self, sides: Workers, plan: Plan) -> None:
        self._sides = sides
        self._plan = plan
        self._pair = Pair(sides)
        self._slots = [self._pair.allocate(plan.blocks) for _ in range(plan.slots)]
        for slot in self._slots:
            self._pair.fill(slot)

    def run(self, count: int, spinner: Child, *, locked: bool) -> float:
        """Seconds from the first ``respond_and_send_async`` to the generation side's last completion."""
        context, generation = self._sides.context, self._sides.generation
        requests = [self._pair.share(slot) for slot, _ in zip(cycle(self._slots), range(count), strict=False)]
        generation.tell("stream", requests=requests, window=len(self._slots))
        time.sleep(_TABLES_SECONDS)
        with _spinning(spinner, locked):
            sent = context.ask("stream", requests=requests, window=self._plan.window)
            received = generation.answer()
        completed(sent, context, count)
        ended = completed(received, generation, count)
        for request in requests:
            self._pair.free(request)
        return ended - float(sent["begun"])

    def compare(self) -> None:
        """Raise ChildError unless all blocks arrived as they were sent."""
        for slot in self._slots:
            self._pair.compare(slot, self._plan.blocks)


@contextmanager
def _spinning(child: Child, locked: bool) -> Iterator[None]:
    child.ask("spin", on=True, locked=locked)
    yield
    child.ask("spin", on=False, locked=locked)
