"""``kvferry bench handoff``: what a client waits for, disaggregated ÷ aggregated, and where that time goes."""

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvferry.bench.handoff_client import Router, Timed
from kvferry.bench.perfetto import TracedRequest
from kvferry.bench.spans import PARTS, exposed_seconds, seconds_by_part
from kvferry.demo.processes import WorkerProcess, started, worker_arguments
from kvferry.launch.together import launcher_of
from kvferry.registry.door import Registry
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.types import Role

AGGREGATED = "aggregated"
CONTEXT_FIRST = "context-first"
GENERATION_FIRST = "generation-first"
PIPELINED = "pipelined"
WAYS = (AGGREGATED, CONTEXT_FIRST, GENERATION_FIRST, PIPELINED)
MOMENTS = ("first", "second", "total")

Ask = Callable[[list[int]], Timed]


class OutputsDifferError(KvferryError):
    """Two ways to serve one prompt disagree about its output."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured.

    Attributes:
        folder: the checkpoint.
        settings: the workers' engine configuration, with a backend and a runtime.
        backend: effective; how the workers are started is its say.
        prompt_tokens: lengths.
        rounds: that count, each with a prompt of its own that all ways get in turn; one more warms up.
        output_tokens: of each output.
        prefill_chunk: tokens of a step.
        vocabulary: token ids are drawn below this.
    """

    folder: Path
    settings: Mapping[str, Any]
    backend: str
    prompt_tokens: tuple[int, ...]
    rounds: int
    output_tokens: int
    prefill_chunk: int
    vocabulary: int
    seed: int = 2026
    plugin_arguments: tuple[str, ...] = ()


@dataclass(slots=True)
class Measurement:
    """All rounds of one prompt length, by way."""

    prompt_tokens: int
    rounds: dict[str, list[Timed]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def median(self, way: str, moment: str) -> float:
        """Median seconds to ``first``, ``second`` or ``total``."""
        seconds: list[float] = [getattr(timed, moment) for timed in self.rounds[way]]
        return statistics.median(seconds)

    def ratio(self, way: str, moment: str) -> float:
        """Median seconds ÷ aggregated's."""
        return self.median(way, moment) / self.median(AGGREGATED, moment)

    def parts(self, way: str) -> dict[str, float]:
        """Median seconds of each part."""
        found = [seconds_by_part(timed.spans) for timed in self.rounds[way]]
        return {part: statistics.median(each[part] for each in found) for part in PARTS}

    def exposed(self, way: str) -> float | None:
        """Median seconds from the end of prefill until the first decode step may run."""
        found = [seconds for timed in self.rounds[way] if (seconds := exposed_seconds(timed.spans)) is not None]
        return statistics.median(found) if found else None

    def exposed_ratio(self, way: str) -> float | None:
        """Exposed hand-off, pipelined ÷ another way."""
        hidden, plain = self.exposed(PIPELINED), self.exposed(way)
        return hidden / plain if hidden is not None and plain else None

    def to_json(self) -> dict[str, Any]:
        """Plain values: seconds and ratios."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "rounds": len(self.rounds[AGGREGATED]),
            "bytes": self.rounds[CONTEXT_FIRST][0].nbytes,
            "exposed_pipelined_to": {way: self.exposed_ratio(way) for way in (CONTEXT_FIRST, GENERATION_FIRST)},
            "ways": {way: self._way(way) for way in WAYS},
        }

    def _way(self, way: str) -> dict[str, Any]:
        return {
            "seconds": {moment: self.median(way, moment) for moment in MOMENTS},
            "to_aggregated": {moment: self.ratio(way, moment) for moment in MOMENTS},
            "parts_seconds": self.parts(way),
            "exposed_seconds": self.exposed(way),
        }

    def traced(self) -> Iterator[TracedRequest]:
        """The last round of each way."""
        for way in WAYS:
            yield TracedRequest(f"{way}, {self.prompt_tokens} tokens", self.rounds[way][-1].spans)


def measure(
    plan: Plan, registry: Registry, say: Callable[[str], None], step: Callable[[], None] = lambda: None
) -> Iterator[Measurement]:
    """Measure one prompt length after the other, the ways of each round in turn.

    Args:
        plan: what to measure.
        registry: for how the workers are started.
        say: told what is going on.
        step: called after each request.

    Raises:
        WorkerFailedError: a worker did not start, ended, or said an error.
        OutputsDifferError: the ways disagree about an output.
    """
    draw = random.Random(plan.seed)
    with _workers(plan, registry, say) as ways:
        for prompt_tokens in plan.prompt_tokens:
            say(f"{prompt_tokens} prompt tokens: {plan.rounds} rounds")
            found = Measurement(prompt_tokens)
            for number in range(plan.rounds + 1):
                prompt = [draw.randrange(plan.vocabulary // 4, plan.vocabulary // 2) for _ in range(prompt_tokens)]
                for way, timed in _round(ways, prompt, step).items():
                    if number:  # the first one warms up
                        found.rounds[way].append(timed)
            yield found


def _round(ways: Mapping[str, Ask], prompt: list[int], step: Callable[[], None]) -> dict[str, Timed]:
    found = {}
    for way, ask in ways.items():
        found[way] = ask(prompt)
        step()
    outputs = {way: timed.tokens for way, timed in found.items()}
    if len({tuple(tokens) for tokens in outputs.values()}) > 1:
        raise OutputsDifferError(f"a prompt of {len(prompt)} tokens was answered differently: {outputs}")
    return found


@contextmanager
def _workers(plan: Plan, registry: Registry, say: Callable[[str], None]) -> Iterator[dict[str, Ask]]:
    """Two pairs, since pipelining is a worker's configuration; aggregated is what a generation worker does alone."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        pairs = {
            pipelined: [_worker(plan, role, folder, pipelined=pipelined, say=say) for role in Role]
            for pipelined in (False, True)
        }
        waits = [stack.enter_context(started(pair, launcher_of(plan.backend, registry))) for pair in pairs.values()]
        say("four workers load the model")
        for wait in waits:
            wait()
        router = Router(plan.output_tokens)
        stack.callback(router.close)
        context, generation = pairs[False]
        early_context, early_generation = pairs[True]
        yield {
            AGGREGATED: lambda prompt: router.aggregated(generation, prompt),
            CONTEXT_FIRST: lambda prompt: router.context_first(context, generation, prompt),
            GENERATION_FIRST: lambda prompt: router.generation_first(context, generation, prompt),
            PIPELINED: lambda prompt: router.generation_first(early_context, early_generation, prompt),
        }


def _worker(plan: Plan, role: Role, folder: Path, *, pipelined: bool, say: Callable[[str], None]) -> WorkerProcess:
    settings = dict(plan.settings)
    settings["cache_transceiver_config"] = {
        **settings["cache_transceiver_config"],
        "enable_pipelined_transfer": pipelined,
    }
    config = folder / f"{role.value}-{'pipelined' if pipelined else 'plain'}.yaml"
    config.write_text(yaml.safe_dump(settings))
    arguments = worker_arguments(
        role,
        folder=plan.folder,
        config=config,
        prefill_chunk=plan.prefill_chunk,
        plugin_arguments=plan.plugin_arguments,
    )
    return WorkerProcess(role.value, arguments, say)
