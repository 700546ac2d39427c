"""``kvferry bench``: measurements, each against the raw transport in the same run."""

from typing import TYPE_CHECKING, Any

import click

from kvferry.cli.output import envelope, json_option, print_json, report_errors

if TYPE_CHECKING:
    from kvferry.bench.transfer import Measurement


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


@click.group()
def bench() -> None:
    """Measure ourselves against the raw transport, in one run."""


@bench.command()
@report_errors
@click.option("--bytes", "nbytes", type=ByteSize(), default="256MiB", show_default=True, help="Of one hand-off.")
@click.option("--blocks", type=click.IntRange(1), multiple=True, default=(4096,), show_default=True, help="Repeatable.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Rounds that count.")
@click.option("--seed", type=int, default=2026, show_default=True, help="Of the shuffled tables.")
@click.option("--backend", default="NIXL", show_default=True)
@click.option("--runtime", default="PYTHON", show_default=True)
@json_option
def transfer(
    nbytes: int, blocks: tuple[int, ...], rounds: int, seed: int, backend: str, runtime: str, as_json: bool
) -> None:
    """Hand-offs between two workers, alternating with raw writes of the same bytes between two processes.

    A hand-off is timed from respond_and_send_async to the generation side's completion. The destination is poisoned
    before, and compared by value after, each round.
    """
    from kvferry.bench.transfer import Plan, baseline_of, measure

    baseline = baseline_of(backend)
    measurements = []
    for count in blocks:
        plan = Plan(backend, runtime, _whole_blocks(nbytes, count), count, rounds, seed)
        measurements.append(measure(plan, baseline, lambda text: _say(text, as_json=as_json)))
    if as_json:
        print_json(envelope(ok=True, transfers=[found.to_json() for found in measurements]))
    else:
        _print_tables(measurements)


@bench.command()
@report_errors
@click.option("--seconds", type=click.FloatRange(1), default=30.0, show_default=True)
@click.option("--backend", default="NIXL", show_default=True)
@click.option("--runtime", default="PYTHON", show_default=True)
@json_option
def idle(seconds: float, backend: str, runtime: str, as_json: bool) -> None:
    """CPU share of two connected workers that have nothing to do."""
    from kvferry.bench.idle import measure

    _say(f"two connected workers, idle for {seconds:g} s", as_json=as_json)
    shares = measure(backend, runtime, seconds)
    if as_json:
        print_json(envelope(ok=True, share_of_a_core=shares))
    else:
        for role, share in shares.items():
            click.echo(f"{role} worker: {share:.2%} of a core")


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


def _print_tables(measurements: "list[Measurement]") -> None:
    from rich.console import Console
    from rich.table import Table

    from kvferry.bench.transfer import rows

    console = Console()
    table = Table("way", "bytes", "blocks", "median ms", "GB/s", "÷ best raw", title="one hand-off")
    for row in rows(measurements):
        table.add_row(*row)
    console.print(table)
    parts = Table("hand-off", "control", "planning", "posting", "wire", title="where the time goes, median ms")
    for found in measurements:
        for name, series in (
            ("in order", found.in_order),
            ("shuffled", found.shuffled),
            ("one block", found.one_block_ours),
        ):
            figures = (f"{series.median_part(part) * 1e3:.3f}" for part in ("control", "planning", "posting", "wire"))
            parts.add_row(f"{name}, {found.plan.blocks if name != 'one block' else 1} blocks", *figures)
    console.print(parts)
    for found in measurements:
        console.print(
            f"one block of {found.plan.block_bytes} bytes: {found.one_block_ours.median * 1e6:.0f} µs = "
            f"{found.one_block_ratio:.2f} × (raw write {found.one_block_raw.median * 1e6:.0f} µs + "
            f"ZeroMQ round trip {found.round_trip.median * 1e6:.0f} µs)"
        )
