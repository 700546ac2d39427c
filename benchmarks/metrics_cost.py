"""What metrics and a trace cost: the same hand-offs by pairs that differ in nothing else, in turn, as ratios.

    python benchmarks/metrics_cost.py                       # scraped every second and traced ÷ neither
    python benchmarks/metrics_cost.py --before FOLDER       # … and neither ÷ the source tree of another version

A hand-off here is what a client waits for: prefill at one worker, the blocks, and the output of the other. Each round
sends one prompt through every pair; a ratio is taken within its round, and the median of all is told, with quartiles.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvferry.demo.processes import WorkerProcess
from kvferry.integrations.checkpoints import find_checkpoint
from kvferry.testing.tiny_checkpoints import write_tiny_checkpoint

CONFIG = """
cache_transceiver_config: {backend: NIXL, transceiver_runtime: RUNTIME}
kv_cache_config: {dtype: float32, max_tokens: 8192, enable_block_reuse: false}
device: cpu
"""
ROOTS = ("core", "plugins", "models_plugins", "backends")
SCRAPE_SECONDS = 1.0


@dataclass(frozen=True)
class Pair:
    """A context and a generation worker."""

    context: WorkerProcess
    generation: WorkerProcess

    def hand_over(self, client: httpx.Client, prompt: list[int], output_tokens: int) -> tuple[float, float]:
        """Seconds of a whole request, and of the blocks' way alone."""
        body = {"prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True}
        begin = time.perf_counter()
        asked = {**body, "disaggregated_params": {"request_type": "context_only"}}
        prefilled = client.post(f"{self.context.http}/v1/completions", json=asked).json()
        params = {**prefilled["choices"][0]["disaggregated_params"], "request_type": "generation_only"}
        answer = client.post(f"{self.generation.http}/v1/completions", json={**body, "disaggregated_params": params})
        seconds = time.perf_counter() - begin
        return seconds, answer.json()["kvferry"]["handoff"]["seconds"]


@contextlib.contextmanager
def running_pair(folder: Path, model: str, *, tree: Path | None, traced: bool) -> Iterator[Pair]:
    """Start a pair, from another source tree if there is one."""
    with contextlib.ExitStack() as stack:
        workers = []
        for role in ("context", "generation"):
            trace = ("--trace", str(folder / f"{role}.json")) if traced else ()
            arguments = ("--role", role, "--model", model, "--config", str(folder / "engine.yaml"), *trace)
            process = WorkerProcess(role, (*arguments, "--drain-seconds", "0"), lambda text: None)
            with _path_of(tree):
                workers.append(stack.enter_context(process))
        for worker in workers:
            worker.wait_ready()
        yield Pair(*workers)


@contextlib.contextmanager
def _path_of(tree: Path | None) -> Iterator[None]:
    if tree is not None:
        os.environ["PYTHONPATH"] = ":".join(str(tree.resolve() / root) for root in ROOTS)
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH", None)


@contextlib.contextmanager
def scraping(pair: Pair) -> Iterator[None]:
    """Ask both workers for their metrics every second."""
    over = threading.Event()

    def scrape() -> None:
        with httpx.Client(trust_env=False, timeout=60) as client:
            while not over.wait(SCRAPE_SECONDS):
                for worker in (pair.context, pair.generation):
                    client.get(f"{worker.http}/metrics").raise_for_status()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Run all rounds; the medians and quartiles of the ratios."""
    draw = random.Random(2026)
    ways = {"plain": (None, False), "traced": (None, True)}
    if arguments.before is not None:
        ways["before"] = (arguments.before, False)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-cost-")))
        model = str(
            write_tiny_checkpoint("llama", root / "tiny")
            if arguments.model == "tiny"
            else find_checkpoint(arguments.model)
        )
        pairs = {}
        for way, (tree, traced) in ways.items():
            folder = root / way
            folder.mkdir()
            (folder / "engine.yaml").write_text(CONFIG.replace("RUNTIME", arguments.runtime))
            pairs[way] = stack.enter_context(running_pair(folder, model, tree=tree, traced=traced))
        stack.enter_context(scraping(pairs["traced"]))
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=300))
        for number in range(arguments.rounds + 3):
            prompt = [draw.randrange(10, 250) for _ in range(arguments.prompt_tokens)]
            for way in draw.sample(list(pairs), len(pairs)):
                found = pairs[way].hand_over(client, prompt, arguments.output_tokens)
                if number >= 3:  # the first ones warm up
                    seconds[way].append(found)
    ratios = {"traced_to_plain": _ratio(seconds["traced"], seconds["plain"])}
    if "before" in seconds:
        ratios["plain_to_before"] = _ratio(seconds["plain"], seconds["before"])
    medians = {way: [statistics.median(each) for each in zip(*found, strict=True)] for way, found in seconds.items()}
    return {**vars(arguments), "median_seconds": medians, **ratios}


def _ratio(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> dict[str, list[float]]:
    found = {}
    for index, name in enumerate(("request", "handoff")):
        each = [mine[index] / other[index] for mine, other in zip(ours, theirs, strict=True)]
        found[name] = [round(quartile, 4) for quartile in statistics.quantiles(each, n=4)]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="tiny: four small layers, so that all else weighs the most.")
    parser.add_argument("--runtime", default="PYTHON", choices=["PYTHON", "CPP"])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--before", type=Path, help="The root of another version's source tree.")
    print(json.dumps(measure(parser.parse_args()), default=str, indent=1))
