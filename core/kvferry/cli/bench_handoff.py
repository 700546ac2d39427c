"""``kvferry bench handoff``: the command, its progress, and its tables."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli.children import tell_children
from kvferry.cli.options import open_registry, plugin_options
from kvferry.cli.output import envelope, json_option, print_json, report_errors

if TYPE_CHECKING:
    from kvferry.bench.handoff import Measurement, Plan
    from kvferry.registry.door import Registry
    from kvferry.registry.toggles import Toggles

DEFAULT_LENGTHS = (128, 512, 1024, 2048, 4096)


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="A checkpoint's folder, a .gguf file, or a name.")
@click.option("--backend", help="The transport; NIXL if neither this nor --config names one.")
@click.option(
    "--runtime",
    type=click.Choice(["auto", "PYTHON", "CPP"], case_sensitive=False),
    help="The transceiver's; PYTHON if neither this nor --config names one.",
)
@click.option(
    "--prompt-tokens",
    "lengths",
    type=click.IntRange(1),
    multiple=True,
    default=DEFAULT_LENGTHS,
    show_default=True,
    help="Length of a prompt. Repeatable.",
)
@click.option("--output-tokens", type=click.IntRange(2), default=8, show_default=True, help="Of each output.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help="Rounds that count, a length.")
@click.option("--prefill-chunk", type=click.IntRange(1), default=256, show_default=True, help="Tokens a step.")
@click.option("--seed", type=int, default=2026, show_default=True, help="Of the prompts.")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Write a trace to FILE; ui.perfetto.dev opens it."
)
@json_option
@report_errors
@plugin_options
def handoff(
    config: Path | None,
    toggles: "Toggles",
    model: str,
    backend: str | None,
    runtime: str | None,
    lengths: tuple[int, ...],
    output_tokens: int,
    rounds: int,
    prefill_chunk: int,
    seed: int,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Time to the first and second token and to the last, disaggregated ÷ aggregated, and where it goes.

    Two pairs of workers and one client, in turn, each prompt by every way: aggregated (one worker does both),
    context-first and generation-first (all blocks sent when the prefill has ended), pipelined (generation-first, each
    chunk sent while the next is computed). No prefix is reused, and all outputs must be equal.
    """
    from kvferry.bench.handoff import WAYS, Plan, measure
    from kvferry.bench.perfetto import write_trace
    from kvferry.cli.demo import plugin_arguments
    from kvferry.integrations.checkpoints import find_checkpoint
    from kvferry.tracing.perfetto import require_trace

    if trace is not None:
        require_trace(trace)
    registry = open_registry(toggles)
    tell_children(registry)
    folder = find_checkpoint(model)
    longest = max(lengths) + output_tokens
    settings, effective = _settings(config, backend, runtime, longest, folder, registry)
    plan = Plan(
        folder=folder,
        settings=settings,
        backend=effective,
        prompt_tokens=lengths,
        rounds=rounds,
        output_tokens=output_tokens,
        prefill_chunk=prefill_chunk,
        vocabulary=_vocabulary(folder, longest),
        seed=seed,
        plugin_arguments=plugin_arguments(),
    )
    found: list[Measurement] = []
    with _progress(len(lengths) * (rounds + 1) * len(WAYS), quiet=as_json) as (say, step):
        for each in measure(plan, registry, say, step):
            found.append(each)
    if trace is not None:
        write_trace([request for each in found for request in each.traced()], trace)
    if as_json:
        rows = [each.to_json() for each in found]
        print_json({**envelope(ok=True), "handoffs": rows, "trace": str(trace) if trace else None})
        return
    _print(plan, found)
    if trace is not None:
        click.echo(f"trace: {trace} (open it in https://ui.perfetto.dev)")


def _settings(
    config: Path | None, backend: str | None, runtime: str | None, longest: int, folder: Path, registry: "Registry"
) -> tuple[dict[str, Any], str]:
    """The workers' configuration, and the backend that it comes to. Raises ConfigError, BackendUnavailableError."""
    from kvferry.cli.demo import buildable_plan, demo_settings
    from kvferry.config import load_engine_args, parse_engine_args
    from kvferry_plugins.errors import ConfigError

    args = load_engine_args(config) if config else parse_engine_args({})
    if args.max_seq_len is not None and longest > args.max_seq_len:
        raise ConfigError(
            f"'max_seq_len' is {args.max_seq_len}, and {longest} tokens are asked for; raise it, or leave it out",
            setting="max_seq_len",
        )
    settings = demo_settings(args, backend, runtime)
    memory = settings["kv_cache_config"]
    if config is None:
        memory["max_tokens"] = 2 * longest + 1024
    memory["enable_block_reuse"] = False
    effective = buildable_plan(settings, folder, registry).backend
    return settings, effective or ""


def _vocabulary(folder: Path, longest: int) -> int:
    """Size of the model's vocabulary. Raises ConfigError for a prompt that it has no positions for."""
    from kvferry.checkpoint import language_model, load_model_spec
    from kvferry_plugins.errors import ConfigError

    text = language_model(load_model_spec(folder).pretrained_config or {})
    positions = text.get("max_position_embeddings")
    if isinstance(positions, int) and longest > positions:
        raise ConfigError(f"the model has {positions} positions, {longest} are asked for", setting="--prompt-tokens")
    return int(text["vocab_size"])


@contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    if quiet:
        yield (lambda text: None), (lambda: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield (
            lambda text: bar.update(task, description=text),
            lambda: bar.advance(task),
        )


def _print(plan: "Plan", found: "Sequence[Measurement]") -> None:
    from rich.table import Table

    from kvferry.bench.handoff import AGGREGATED, CONTEXT_FIRST, GENERATION_FIRST, MOMENTS, WAYS
    from kvferry.bench.spans import PARTS
    from kvferry.cli.bench_tables import wide_console

    times = Table("prompt", "way", *(f"{moment} ms" for moment in MOMENTS), *(f"{moment} ÷" for moment in MOMENTS))
    times.title = f"what a client waits for, median of {plan.rounds}; ÷ aggregated"
    where = Table("prompt", "way", *(f"{part} ms" for part in PARTS), "exposed ms", "MB", title="where the time goes")
    for each in found:
        for way in WAYS:
            row = (f"{each.prompt_tokens:,}", way)
            seconds = (f"{each.median(way, moment) * 1e3:.1f}" for moment in MOMENTS)
            ratios = ("" if way == AGGREGATED else f"{each.ratio(way, moment):.3f}" for moment in MOMENTS)
            times.add_row(*row, *seconds, *ratios)
            exposed = each.exposed(way)
            parts = (f"{part * 1e3:.1f}" for part in each.parts(way).values())
            moved = each.rounds[way][0].nbytes / 1e6
            where.add_row(*row, *parts, "–" if exposed is None else f"{exposed * 1e3:.1f}", f"{moved:.1f}")
    wide_console().print(times, where)
    for each in found:
        plain = ((way, each.exposed_ratio(way)) for way in (CONTEXT_FIRST, GENERATION_FIRST))
        told = " · ".join(f"÷ {way} {ratio:.2f}" for way, ratio in plain if ratio is not None)
        click.echo(f"{each.prompt_tokens:,} tokens: exposed hand-off, pipelined {told}")
