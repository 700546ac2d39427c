"""``kvferry bench transfer``: hand-offs between two workers, alternating with raw writes of the same bytes."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvferry.bench.baseline import Echo, RawBaseline
from kvferry.bench.processes import Child, ChildError
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Toggles
from kvferry_plugins.errors import ConfigError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured.

    Attributes:
        nbytes: of one hand-off.
        blocks: that it consists of.
        rounds: that count; one more warms up.
        seed: of the permutation.
    """

    backend: str
    runtime: str
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
    parts: list[dict[str, float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    def median_part(self, name: str) -> float:
        """Median seconds of one part."""
        return statistics.median(part[name] for part in self.parts) if self.parts else 0.0


@dataclass(slots=True)
class Measurement:
    """What one run found: each way's series, by name."""

    plan: Plan
    raw: dict[str, Series]
    raw_one_block: dict[str, Series]
    in_order: Series = field(default_factory=Series)
    shuffled: Series = field(default_factory=Series)
    one_block_ours: Series = field(default_factory=Series)
    round_trip: Series = field(default_factory=Series)

    @property
    def best_raw(self) -> str:
        """The raw way that was fastest."""
        return min(self.raw, key=lambda way: self.raw[way].median)

    def ratio(self, series: Series) -> float:
        """Throughput of a series ÷ that of the best raw way."""
        return self.raw[self.best_raw].median / series.median

    @property
    def one_block_raw(self) -> Series:
        """Raw writes of one block, by the way that was faster."""
        return min(self.raw_one_block.values(), key=lambda series: series.median)

    @property
    def one_block_ratio(self) -> float:
        """Our one-block hand-off ÷ (one raw write of that block + one ZeroMQ round trip)."""
        return self.one_block_ours.median / (self.one_block_raw.median + self.round_trip.median)

    def to_json(self) -> dict[str, Any]:
        """Plain values: seconds, GB/s (10⁹ bytes) and ratios."""
        nbytes = self.plan.nbytes

        def throughput(series: Series) -> dict[str, Any]:
            return {"median_seconds": series.median, "gigabytes_per_second": nbytes / series.median / 1e9}

        def ours(series: Series) -> dict[str, Any]:
            parts = {name: series.median_part(name) for name in ("control", "planning", "posting", "wire")}
            return {**throughput(series), "ratio_to_raw": self.ratio(series), "parts_seconds": parts}

        return {
            "backend": self.plan.backend,
            "runtime": self.plan.runtime,
            "bytes": nbytes,
            "blocks": self.plan.blocks,
            "rounds": self.plan.rounds,
            "seed": self.plan.seed,
            "raw": {way: throughput(series) for way, series in self.raw.items()},
            "best_raw": self.best_raw,
            "in_order": ours(self.in_order),
            "shuffled": ours(self.shuffled),
            "one_block": {
                "bytes": self.plan.block_bytes,
                "raw_median_seconds": self.one_block_raw.median,
                "zeromq_round_trip_median_seconds": self.round_trip.median,
                "median_seconds": self.one_block_ours.median,
                "ratio": self.one_block_ratio,
            },
        }


class Pair:
    """A context and a generation worker, and the hand-offs between them."""

    def __init__(self, plan: Plan, context: Child, generation: Child) -> None:
        self._plan = plan
        self._context = context
        self._generation = generation
        self._requests = 0

    def hand_off(self, blocks: int) -> tuple[float, dict[str, float]]:
        """One hand-off, checked by value.

        Returns:
            Seconds from ``respond_and_send_async`` to the generation side's completion, and their parts.

        Raises:
            ChildError: it failed, or the bytes that arrived are not the bytes that were sent.
        """
        self._requests += 1
        request = self._requests
        for side in (self._context, self._generation):
            side.ask("allocate", request=request, blocks=blocks)
        self._context.ask("fill", request=request, seed=request)
        self._generation.ask("poison", request=request)
        params = self._context.ask("params", request=request)
        self._generation.ask("receive", request=request, **params)
        planning = self._context.ask("planning_seconds", request=request)["seconds"]
        self._context.ask("parts")
        self._generation.tell("wait", at_least=1)
        begun = self._context.ask("respond", request=request)["begun"]
        seconds = _completed(self._generation.answer(), self._generation) - begun
        _completed(self._context.ask("wait", at_least=1), self._context)
        wrong = self._generation.ask("wrong_blocks", request=request, seed=request)
        if wrong["wrong"]:
            raise ChildError(f"{wrong['wrong']} of {blocks} blocks arrived wrong, the first at {wrong['first']}")
        parts = self._context.ask("parts")
        for side in (self._context, self._generation):
            side.ask("free", request=request)
        control = max(0.0, seconds - planning - parts["wire"])
        return seconds, {"planning": planning, **parts, "control": control}

    def permute(self, seed: int | None) -> None:
        """Shuffle both workers' tables, each its own way; None = in order again."""
        self._context.ask("permute", seed=seed)
        self._generation.ask("permute", seed=None if seed is None else seed + 1)


def _completed(answer: Any, child: Child) -> float:
    events = answer["events"]
    if not events:
        raise ChildError(f"{child.name} saw no end of the hand-off: {child.ask('status')}")
    if events[0]["outcome"] != "completed":
        raise ChildError(f"{child.name}: the hand-off {events[0]['outcome']}: {events[0]['message']}")
    return float(answer["at"])


@contextmanager
def workers(plan: Plan) -> Iterator[tuple[Child, Child]]:
    """Start a context and a generation worker."""
    config = {
        "backend": plan.backend,
        "transceiver_runtime": plan.runtime,
        "kv_transfer_poll_interval_ms": 30_000,
    }
    with _worker("context", plan, config) as context, _worker("generation", plan, config) as generation:
        yield context, generation


@contextmanager
def _worker(role: str, plan: Plan, config: dict[str, Any]) -> Iterator[Child]:
    options = {"role": role, "blocks": plan.blocks, "block_bytes": plan.block_bytes, "config": config}
    with Child("kvferry.bench.peer", [json.dumps(options)], name=f"{role} worker") as worker:
        worker.answer(timeout=120)
        yield worker


def baseline_of(backend: str) -> str:
    """The module that runs a backend raw. Raises ConfigError for a backend that is unknown, or declares none."""
    declared = {answer.value.name: answer.value for answer in load_registry(toggles=Toggles()).transfer_backends()}
    if backend not in declared:
        raise ConfigError(f"no plugin declares backend {backend!r}; there are {', '.join(sorted(declared))}")
    if not declared[backend].baseline:
        raise ConfigError(f"backend {backend} declares no raw baseline, so there is nothing to compare with")
    return declared[backend].baseline


def measure(plan: Plan, baseline: str, progress: Progress) -> Measurement:
    """Run all ways, alternating, so that a noisy moment meets each of them.

    Args:
        plan: what to measure.
        baseline: module that ``python -m`` runs as the raw transport.
        progress: told what is being done.

    Raises:
        ChildError: a process failed; a hand-off failed or arrived wrong.
    """
    progress("starting workers and the raw transport")
    with workers(plan) as children, RawBaseline(baseline, plan.nbytes, plan.block_bytes) as raw, Echo() as echo:
        pair = Pair(plan, *children)
        found = Measurement(plan, {way: Series() for way in raw.ways}, {way: Series() for way in raw.ways})
        for number in range(plan.rounds + 1):
            progress(f"round {number} of {plan.rounds}" if number else "warming up")
            _round(pair, raw, found, plan, counts=number > 0)
        progress("one block")
        _one_block(pair, raw, echo, found, rounds=max(50, plan.rounds))
    return found


def _round(pair: Pair, raw: RawBaseline, found: Measurement, plan: Plan, *, counts: bool) -> None:
    for way in raw.ways:
        seconds = raw.write(way)
        if counts:
            found.raw[way].seconds.append(seconds)
    for series, seed in ((found.in_order, None), (found.shuffled, plan.seed)):
        pair.permute(seed)
        seconds, parts = pair.hand_off(plan.blocks)
        if counts:
            series.seconds.append(seconds)
            series.parts.append(parts)
    pair.permute(None)


def _one_block(pair: Pair, raw: RawBaseline, echo: Echo, found: Measurement, *, rounds: int) -> None:
    pair.hand_off(1)
    for _ in range(rounds):
        for way in raw.ways:
            found.raw_one_block[way].seconds.append(raw.write_one_block(way))
        found.round_trip.seconds.append(echo.round_trip())
        seconds, parts = pair.hand_off(1)
        found.one_block_ours.seconds.append(seconds)
        found.one_block_ours.parts.append(parts)


def rows(measurements: Sequence[Measurement]) -> list[tuple[str, ...]]:
    """A table: way, bytes, blocks, median ms, GB/s, ratio to raw."""
    table: list[tuple[str, ...]] = []
    for found in measurements:
        size = (f"{found.plan.nbytes / (1 << 20):g} MiB", f"{found.plan.blocks}")
        for way, series in found.raw.items():
            best = " (best)" if way == found.best_raw else ""
            table.append((f"raw, {way}{best}", *size, *_figures(found, series)))
        table.append(("kvferry, in order", *size, *_figures(found, found.in_order)))
        table.append((f"kvferry, shuffled (seed {found.plan.seed})", *size, *_figures(found, found.shuffled)))
    return table


def _figures(found: Measurement, series: Series) -> tuple[str, str, str]:
    rate = found.plan.nbytes / series.median / 1e9
    return f"{series.median * 1e3:.2f}", f"{rate:.2f}", f"{found.ratio(series):.2f}"
