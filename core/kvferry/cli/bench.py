"""``kvferry bench``: measurements, each against the raw transport in the same run."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvferry.cli.bench_handoff import handoff
from kvferry.cli.bench_plan import plan
from kvferry.cli.bench_resolve import resolve
from kvferry.cli.output import envelope, error_items, exit_status, json_option, print_errors, print_json, report_errors
from kvferry_plugins.errors import KvferryError

if TYPE_CHECKING:
    from kvferry.bench.pairings import Pairing

Found = TypeVar("Found")
Say = Callable[[str], None]


class ByteSize(click.ParamType[int]):
    """``4096``, ``64KiB``, ``256MiB``, ``1GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read a size in bytes."""
        if isinstance(value, int):
            return value
        for unit, factor in (("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("", 1)):
            number = value.removesuffix(unit)
            if value.endswith(unit) and number.isdigit() and int(number) > 0:
                return int(number) * factor
        return self.fail(f"{value!r} is no size; write 4096, 64KiB, 256MiB or 1GiB", param, ctx)


def pairing_options(*default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--backend``, ``--runtime`` and ``--all``, which arrive as ``pairings``, each of them usable here.

    Args:
        default: runtimes where none is asked for.
    """
    told = " and ".join(default) or "the first that each backend declares"

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @click.option("--backend", multiple=True, default=("NIXL",), show_default=True, help="Repeatable.")
        @click.option("--runtime", multiple=True, help=f"Repeatable; default: {told}.")
        @click.option("--all", "take_all", is_flag=True, help="Every runtime × backend pair that is installed here.")
        @click.option(
            "--shared-memory/--no-shared-memory",
            "shared",
            default=True,
            show_default=True,
            help="Whether CPP may copy into the peer's pool, or must use the backend.",
        )
        @functools.wraps(function)
        def with_pairings(
            *args: Any, backend: tuple[str, ...], runtime: tuple[str, ...], take_all: bool, shared: bool, **kwargs: Any
        ) -> Any:
            from kvferry.bench.pairings import asked_pairings, every_pairing, require_usable

            pairings = every_pairing() if take_all else asked_pairings(backend, runtime or default)
            require_usable(pairings)
            pairings = [dataclasses.replace(pairing, shared_memory=shared) for pairing in pairings]
            return function(*args, pairings=pairings, **kwargs)

        return with_pairings

    return decorate


@click.group()
def bench() -> None:
    """Measure ourselves against the raw transport, in one run."""


bench.add_command(handoff)
bench.add_command(plan)
bench.add_command(resolve)


@bench.command()
@report_errors
@pairing_options()
@click.option("--bytes", "nbytes", type=ByteSize(), default="256MiB", show_default=True, help="Of one hand-off.")
@click.option("--blocks", type=click.IntRange(1), multiple=True, default=(4096,), show_default=True, help="Repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Rounds that count.")
@click.option("--seed", type=int, default=2026, show_default=True, help="Of the shuffled tables.")
@click.option("--against", multiple=True, metavar="BACKEND", help="Another backend's raw tool, in turn. Repeatable.")
@click.option("--chart", type=click.Path(path_type=Path), help="Draw GB/s over block counts: FILE.png or FILE.svg.")
@json_option
def transfer(
    pairings: "list[Pairing]",
    nbytes: int,
    blocks: tuple[int, ...],
    rounds: int,
    seed: int,
    against: tuple[str, ...],
    chart: Path | None,
    as_json: bool,
) -> None:
    """Hand-offs between two workers, alternating with raw writes of the same bytes between two processes.

    A hand-off is timed from respond_and_send_async to the generation side's completion. The destination is poisoned
    before, and compared by value after, each round. A memcpy of the same bytes takes its turn too.

    For a chart: --blocks 1 --blocks 16 --blocks 256 --blocks 4096 --chart transfer.svg
    """
    from kvferry.bench.chart import draw, require_chart
    from kvferry.bench.measurement import Measurement, Plan
    from kvferry.bench.transfer import baselines_of, measure
    from kvferry.cli.bench_tables import print_transfers

    if chart is not None:
        require_chart(chart)
    modules = {pairing: baselines_of(pairing, against) for pairing in pairings}
    plans = [
        Plan(pairing, _whole_blocks(nbytes, count), count, rounds, seed) for pairing in pairings for count in blocks
    ]

    def run(plan: Plan, say: Say) -> Measurement:
        return measure(plan, modules[plan.pairing], say)

    found, errors = _measure_each(plans, run, as_json=as_json)
    if chart is not None and found:
        draw(found, chart)
    if as_json:
        _print_json(errors, transfers=[each.to_json() for each in found], chart=str(chart) if chart else None)
    else:
        print_transfers(found)
    _end(errors, as_json=as_json)


@bench.command()
@report_errors
@pairing_options()
@click.option("--seconds", type=click.FloatRange(1), default=30.0, show_default=True)
@json_option
def idle(pairings: "list[Pairing]", seconds: float, as_json: bool) -> None:
    """CPU share of two connected workers that have nothing to do."""
    from kvferry.bench.idle import measure

    def run(pairing: "Pairing", say: Say) -> "tuple[Pairing, dict[str, float]]":
        say(f"{pairing}: two connected workers, idle for {seconds:g} s")
        return pairing, measure(pairing, seconds)

    found, errors = _measure_each(pairings, run, as_json=as_json)
    if as_json:
        rows = [{"backend": each.backend, "runtime": each.runtime, "share_of_a_core": shares} for each, shares in found]
        _print_json(errors, idle=rows)
    else:
        for pairing, shares in found:
            told = ", ".join(f"{role} worker {share:.2%} of a core" for role, share in shares.items())
            click.echo(f"{pairing}: {told}")
    _end(errors, as_json=as_json)


@bench.command()
@report_errors
@pairing_options("CPP")
@click.option("--bytes", "nbytes", type=ByteSize(), default="256MiB", show_default=True, help="Of one hand-off.")
@click.option("--blocks", type=click.IntRange(1), default=4096, show_default=True, help="Of one hand-off.")
@click.option("--hand-offs", type=click.IntRange(1), default=24, show_default=True, help="Of one stream.")
@click.option("--window", type=click.IntRange(1), default=4, show_default=True, help="Hand-offs in flight at a time.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds that count.")
@json_option
def gil(
    pairings: "list[Pairing]", nbytes: int, blocks: int, hand_offs: int, window: int, rounds: int, as_json: bool
) -> None:
    """Throughput while a Python thread spins in the sender's process, against one that spins in another process.

    Streams of hand-offs, some in flight at a time, and single ones; PYTHON over NIXL is measured beside what is asked
    for, where it is installed.
    """
    from kvferry.bench.gil import Measurement, Plan, measure
    from kvferry.bench.pairings import Pairing, missing
    from kvferry.cli.bench_tables import print_gil

    beside = Pairing("PYTHON", "NIXL")
    if beside not in (Pairing(each.runtime, each.backend) for each in pairings) and not missing(beside):
        pairings = [*pairings, beside]
    whole = _whole_blocks(nbytes, blocks)

    def run(pairing: Pairing, say: Say) -> Measurement:
        return measure(Plan(pairing, whole, blocks, hand_offs, window, rounds), say)

    found, errors = _measure_each(pairings, run, as_json=as_json)
    if as_json:
        _print_json(errors, gil=[each.to_json() for each in found])
    else:
        print_gil(found)
    _end(errors, as_json=as_json)


@bench.command()
@report_errors
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Rounds that count.")
@json_option
def startup(rounds: int, as_json: bool) -> None:
    """Wall time of the verbs that must be light, against importing pydantic and pluggy."""
    from dataclasses import asdict

    from kvferry.bench.startup import measure

    verbs = {"--help": ["--help"], "plugins list": ["plugins", "list"], "explain": ["explain"]}
    baseline, found = measure(verbs, rounds)
    if as_json:
        print_json(envelope(ok=True, baseline_seconds=baseline, verbs=[asdict(verb) for verb in found]))
        return
    click.echo(f"import pydantic, pluggy: {baseline * 1e3:.0f} ms")
    for verb in found:
        heavy = f"; imports {', '.join(verb.heavy)}" if verb.heavy else ""
        click.echo(f"kvferry {verb.verb}: {verb.median_seconds * 1e3:.0f} ms = {verb.ratio:.2f} ×{heavy}")


Asked = TypeVar("Asked")


def _measure_each(
    asked: Iterable[Asked], measure: Callable[[Asked, Say], Found], *, as_json: bool
) -> tuple[list[Found], list[KvferryError]]:
    """Measure one after the other; one that fails costs only its own figures."""
    found: list[Found] = []
    errors: list[KvferryError] = []
    for each in asked:
        try:
            found.append(measure(each, lambda text: _say(text, as_json=as_json)))
        except KvferryError as error:
            errors.append(error)
    return found, errors


def _print_json(errors: Sequence[KvferryError], **fields: object) -> None:
    items = [item for error in errors for item in error_items(error)]
    print_json({**envelope(ok=not errors, errors=items), **fields})


def _end(errors: Sequence[KvferryError], *, as_json: bool) -> None:
    """Report what failed, and end with its exit status. Raises SystemExit."""
    if not as_json:
        print_errors(errors)
    if errors:
        raise SystemExit(exit_status(errors[0]))


def _whole_blocks(nbytes: int, blocks: int) -> int:
    """Round down to what whole blocks of the bench's geometry hold."""
    from kvferry_plugins.errors import ConfigError

    unit = blocks * 64
    if nbytes < unit:
        raise ConfigError(f"{nbytes} bytes are less than {blocks} blocks of 64 bytes", setting="--bytes")
    return nbytes // unit * unit


def _say(text: str, *, as_json: bool) -> None:
    if not as_json:
        click.echo(f"… {text}", err=True)
