"""What ``kvferry bench`` prints when it is not asked for JSON."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from kvferry.bench.gil import CONTROL, ELSEWHERE, PLACES
from kvferry.bench.gil import Measurement as GilMeasurement
from kvferry.bench.measurement import PARTS, Measurement, Series, labelled

_LOG_WIDTH = 132


def print_transfers(measurements: Sequence[Measurement]) -> None:
    """Print throughputs, where the time goes, and single blocks: for each measurement in turn."""
    console = wide_console()
    for found in measurements:
        console.print(_throughputs(found), _parts(found), _one_block(found), "")


def _throughputs(found: Measurement) -> Table:
    plan = found.plan
    ratios = ("÷ best raw", "÷ memcpy", *(f"÷ {name}" for name in found.against))
    title = f"{plan.pairing}: {_size(plan.nbytes)} in {plan.blocks:,} × {_size(plan.block_bytes)}"
    table = Table("way", "median ms", "GB/s", *ratios, title=title)
    for label, series in labelled(found):
        table.add_row(label, f"{series.median * 1e3:.2f}", f"{found.rate(series):.2f}", *_ratios(found, series))
    return table


def _ratios(found: Measurement, series: Series) -> Iterator[str]:
    for ratio in (found.to_raw(series), found.to_memcpy(series), *found.to_others(series).values()):
        yield "–" if ratio is None else f"{ratio:.2f}"


def _parts(found: Measurement) -> Table:
    table = Table("hand-off", *PARTS, title="where the time goes, median ms")
    for name, series in (
        ("in order", found.in_order),
        ("shuffled", found.shuffled),
        ("one block", found.one_block_ours),
    ):
        seconds = [series.median_part(part) for part in PARTS]
        table.add_row(name, *("in wire" if each is None else f"{each * 1e3:.3f}" for each in seconds))
    return table


def _one_block(found: Measurement) -> str:
    ours, trip = found.one_block_ours.median * 1e6, found.round_trip.median * 1e6
    text = f"one block of {_size(found.plan.block_bytes)}: {ours:.0f} µs"
    if found.one_block_raw is None:
        return text
    raw = found.one_block_raw.median * 1e6
    return f"{text} = {found.one_block_ratio:.2f} × (raw write {raw:.0f} µs + ZeroMQ round trip {trip:.0f} µs)"


def _size(nbytes: int) -> str:
    unit, name = (1 << 20, "MiB") if nbytes >= 1 << 20 else (1 << 10, "KiB")
    return f"{nbytes / unit:g} {name}"


def wide_console() -> Console:
    """Where nobody watches, lines are as long as the tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=_LOG_WIDTH)


def print_gil(measurements: Sequence[GilMeasurement]) -> None:
    """Print throughputs by where the spinner was, and their ratio."""
    title = "a Python thread spins in the sender's process, or in another one"
    columns = (*(f"GB/s, {place}" for place in PLACES), "÷ other", "÷ no lock")
    table = Table("sender", "hand-offs", *columns, title=title)
    for found in measurements:
        plan = found.plan
        in_flight = f"{plan.hand_offs} × {_size(plan.nbytes)}, {plan.window} in flight"
        for kind, what in (("stream", in_flight), ("single", "one at a time")):
            rates = (f"{found.rate(kind, place):.2f}" for place in PLACES)
            ratios = (f"{found.ratio(kind, place):.2f}" for place in (ELSEWHERE, CONTROL))
            table.add_row(str(plan.pairing), what, *rates, *ratios)
    wide_console().print(table)
