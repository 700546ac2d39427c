"""What ``kvferry bench transfer`` measures and finds: plain series of seconds, and what is told of them."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.pairings import Pairing

PARTS = ("control", "planning", "posting", "wire")
"""Of a hand-off's time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured.

    Attributes:
        nbytes: of one hand-off.
        blocks: that it consists of.
        rounds: that count; one more warms up.
        seed: of the permutation.
    """

    pairing: Pairing
    nbytes: int
    blocks: int
    rounds: int
    seed: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.nbytes // self.blocks


@dataclass(slots=True)
class Series:
    """The seconds of one way, round by round."""

    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float | None]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    def median_part(self, name: str) -> float | None:
        """Median seconds of one part; None where it is not known apart."""
        known = [seconds for part in self.parts if (seconds := part[name]) is not None]
        return statistics.median(known) if known else None

    def take(self, measure: Callable[[], float], *, counts: bool) -> None:
        """Measure once more, and keep it unless it only warms up."""
        seconds = measure()
        if counts:
            self.seconds.append(seconds)


Ways = dict[str, Series]
"""A raw transport's own ways, by name."""


def fastest(ways: Ways) -> str | None:
    """The way with the smallest median; None where there is none."""
    return min(ways, key=lambda way: ways[way].median, default=None)


def ratio(series: Series, base: Series | None) -> float | None:
    """Throughput of one series ÷ that of another of the same bytes."""
    return base.median / series.median if base is not None else None


@dataclass(slots=True)
class Measurement:
    """What one run found: each way's series, by name."""

    plan: Plan
    raw: Ways
    """The backend's own raw tool; empty where it declares none."""
    raw_one_block: Ways
    against: dict[str, Ways] = field(default_factory=dict)
    """Other backends' raw tools, taken in the same turns."""
    memcpy: Series = field(default_factory=Series)
    memcpy_of_pieces: Series = field(default_factory=Series)
    in_order: Series = field(default_factory=Series)
    shuffled: Series = field(default_factory=Series)
    one_block_ours: Series = field(default_factory=Series)
    round_trip: Series = field(default_factory=Series)

    @property
    def best_raw(self) -> str | None:
        """The raw way that was fastest."""
        return fastest(self.raw)

    def to_raw(self, series: Series) -> float | None:
        """Throughput ÷ that of the best raw way."""
        return ratio(series, self.raw[self.best_raw] if self.best_raw else None)

    def to_memcpy(self, series: Series) -> float | None:
        """Throughput ÷ that of a memcpy: of the same pieces for what was shuffled, else of all in one."""
        return ratio(series, self.memcpy_of_pieces if series is self.shuffled else self.memcpy)

    def to_others(self, series: Series) -> dict[str, float | None]:
        """Throughput ÷ that of each other backend's best raw way."""
        return {name: ratio(series, ways[fastest(ways) or ""]) for name, ways in self.against.items()}

    @property
    def one_block_raw(self) -> Series | None:
        """Raw writes of one block, by the way that was faster."""
        way = fastest(self.raw_one_block)
        return self.raw_one_block[way] if way else None

    @property
    def one_block_ratio(self) -> float | None:
        """Our one-block hand-off ÷ (one raw write of that block + one ZeroMQ round trip)."""
        if self.one_block_raw is None:
            return None
        return self.one_block_ours.median / (self.one_block_raw.median + self.round_trip.median)

    def to_json(self) -> dict[str, Any]:
        """Plain values: seconds, GB/s (10⁹ bytes) and ratios."""
        plan = self.plan
        return {
            "backend": plan.pairing.backend,
            "runtime": plan.pairing.runtime,
            "shared_memory": plan.pairing.shared_memory,
            "bytes": plan.nbytes,
            "blocks": plan.blocks,
            "rounds": plan.rounds,
            "seed": plan.seed,
            "raw": self._all_ways(self.raw),
            "best_raw": self.best_raw,
            "against": {name: self._all_ways(ways) for name, ways in self.against.items()},
            "memcpy": {"whole": self._throughput(self.memcpy), "same_pieces": self._throughput(self.memcpy_of_pieces)},
            "in_order": self._ours(self.in_order),
            "shuffled": self._ours(self.shuffled),
            "one_block": {
                "bytes": plan.block_bytes,
                "raw_median_seconds": self.one_block_raw.median if self.one_block_raw else None,
                "zeromq_round_trip_median_seconds": self.round_trip.median,
                "median_seconds": self.one_block_ours.median,
                "ratio": self.one_block_ratio,
            },
        }

    def _throughput(self, series: Series) -> dict[str, Any]:
        return {"median_seconds": series.median, "gigabytes_per_second": self.rate(series)}

    def _all_ways(self, ways: Ways) -> dict[str, Any]:
        return {way: self._throughput(series) for way, series in ways.items()}

    def _ours(self, series: Series) -> dict[str, Any]:
        return {
            **self._throughput(series),
            "ratio_to_raw": self.to_raw(series),
            "ratio_to_memcpy": self.to_memcpy(series),
            "ratio_to_others": self.to_others(series),
            "parts_seconds": {name: series.median_part(name) for name in PARTS},
        }

    def rate(self, series: Series) -> float:
        """GB/s, 10⁹ bytes."""
        return self.plan.nbytes / series.median / 1e9


def labelled(found: Measurement) -> Iterable[tuple[str, Series]]:
    """Every way by the name that tables and charts give it, in the order of the rounds."""
    best = found.best_raw
    for way, series in found.raw.items():
        yield f"raw, {way}{' (best)' if way == best else ''}", series
    for name, ways in found.against.items():
        for way, series in ways.items():
            yield f"raw {name}, {way}", series
    yield "memcpy", found.memcpy
    yield "memcpy, shuffled", found.memcpy_of_pieces
    yield "kvferry, in order", found.in_order
    yield "kvferry, shuffled", found.shuffled
