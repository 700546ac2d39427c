"""``kvferry bench gil``: what a Python thread that spins in the sender's process costs, against one in another process.

Both take a core; only the first takes the interpreter's lock from the sender.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.measurement import Series
from kvferry.bench.pair import Pair, Workers, completed, workers
from kvferry.bench.pairings import Pairing
from kvferry.bench.processes import Child

PLACES = ("same process", "other process")
"""Where the spinner is: the sender's process, or one of its own."""

STREAM, SINGLE = "stream", "single"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured.

    Attributes:
        nbytes: of one hand-off.
        blocks: of one hand-off.
        hand_offs: of one stream.
        window: hand-offs in flight at a time.
        rounds: that count; one more warms up.
    """

    pairing: Pairing
    nbytes: int
    blocks: int
    hand_offs: int
    window: int
    rounds: int


@dataclass(slots=True)
class Measurement:
    """What one run found."""

    plan: Plan
    series: Mapping[str, Mapping[str, Series]] = field(
        default_factory=lambda: {kind: {place: Series() for place in PLACES} for kind in (STREAM, SINGLE)}
    )
    """``stream`` or ``single`` → place of the spinner → seconds."""

    def ratio(self, kind: str) -> float:
        """Throughput with the spinner in the sender's process ÷ with it in another one."""
        here, elsewhere = (self.series[kind][place].median for place in PLACES)
        return elsewhere / here

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
            }
            for kind, places in self.series.items()
        }
        return {
            "backend": plan.pairing.backend,
            "runtime": plan.pairing.runtime,
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
    pools = workers(plan.pairing, blocks=plan.hand_offs * plan.blocks, block_bytes=plan.nbytes // plan.blocks)
    with pools as sides, Child("kvferry.bench.spinner", name="spinner") as spinner:
        pair, spinners = Pair(sides), dict(zip(PLACES, (sides.context, spinner), strict=True))
        for number in range(plan.rounds + 1):
            progress(f"round {number} of {plan.rounds}" if number else "warming up")
            for kind, count in ((STREAM, plan.hand_offs), (SINGLE, 1)):
                for place, child in spinners.items():
                    seconds = _stream(sides, pair, plan, count, child, compares=number in (0, plan.rounds))
                    if number:
                        found.series[kind][place].seconds.append(seconds)
    return found


def _stream(sides: Workers, pair: Pair, plan: Plan, count: int, spinner: Child, *, compares: bool) -> float:
    """Seconds from the first ``respond_and_send_async`` to the generation side's last completion."""
    requests = [pair.prepare(plan.blocks) for _ in range(count)]
    if compares:
        _each(pair.fill, requests)
    with _spinning(spinner):
        sides.generation.tell("wait", at_least=count)
        sent = sides.context.ask("stream", requests=requests, window=plan.window)
        ended = completed(sides.generation.answer(), sides.generation, count)
    completed({"at": ended, **sent}, sides.context, count)
    if compares:
        _each(lambda request: pair.compare(request, plan.blocks), requests)
    _each(pair.free, requests)
    return ended - float(sent["begun"])


@contextmanager
def _spinning(child: Child) -> Iterator[None]:
    child.ask("spin", on=True)
    yield
    child.ask("spin", on=False)


def _each(act: Callable[[int], None], requests: Iterable[int]) -> None:
    for request in requests:
        act(request)
