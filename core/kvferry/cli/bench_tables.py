"""What ``kvferry bench`` prints when it is not asked for JSON."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from kvferry.bench.gil import PLACES
from kvferry.bench.gil import Measurement as GilMeasurement
from kvferry.bench.measurement import PARTS, Measurement, Series, labelled


def print_transfers(measurements: Sequence[Measurement]) -> None:
    """Print throughputs, where the time goes, and single blocks: for each pairing in turn."""
    console = Console()
    for pairing, group in groupby(measurements, key=lambda found: found.plan.pairing):
        of_pairing = list(group)
        console.print(_throughputs(f"{pairing}: one hand-off of {_size(of_pairing[0].plan.nbytes)}", of_pairing))
        console.print(_parts(of_pairing))
        for found in of_pairing:
            console.print(_one_block(found))


def _throughputs(title: str, measurements: Sequence[Measurement]) -> Table:
    others = list(measurements[0].against)
    ratios = ("÷ best raw", "÷ memcpy", *(f"÷ raw {name}" for name in others))
    table = Table("way", "blocks", "median ms", "GB/s", *ratios, title=title)
    for found in measurements:
        for label, series in labelled(found):
            table.add_row(label, *_figures(found, series))
    return table


def _figures(found: Measurement, series: Series) -> Iterator[str]:
    yield f"{found.plan.blocks} × {_size(found.plan.block_bytes)}"
    yield f"{series.median * 1e3:.2f}"
    yield f"{found.rate(series):.2f}"
    for ratio in (found.to_raw(series), found.to_memcpy(series), *found.to_others(series).values()):
        yield "–" if ratio is None else f"{ratio:.2f}"


def _parts(measurements: Sequence[Measurement]) -> Table:
    table = Table("hand-off", *PARTS, title="where the time goes, median ms")
    for found in measurements:
        for name, series, blocks in (
            ("in order", found.in_order, found.plan.blocks),
            ("shuffled", found.shuffled, found.plan.blocks),
            ("one block", found.one_block_ours, 1),
        ):
            seconds = [series.median_part(part) for part in PARTS]
            shown = ("in wire" if each is None else f"{each * 1e3:.3f}" for each in seconds)
            table.add_row(f"{name}, {blocks} block{'s' if blocks > 1 else ''}", *shown)
    return table


def _size(nbytes: int) -> str:
    unit, name = (1 << 20, "MiB") if nbytes >= 1 << 20 else (1 << 10, "KiB")
    return f"{nbytes / unit:g} {name}"


def _one_block(found: Measurement) -> str:
    ours, trip = found.one_block_ours.median * 1e6, found.round_trip.median * 1e6
    text = f"one block of {found.plan.block_bytes} bytes: {ours:.0f} µs"
    if found.one_block_raw is None:
        return text
    raw = found.one_block_raw.median * 1e6
    return f"{text} = {found.one_block_ratio:.2f} × (raw write {raw:.0f} µs + ZeroMQ round trip {trip:.0f} µs)"


def print_gil(measurements: Sequence[GilMeasurement]) -> None:
    """Print throughputs by where the spinner was, and their ratio."""
    title = "a Python thread spins in the sender's process, or in another one"
    table = Table("sender", "hand-offs", *(f"GB/s, {place}" for place in PLACES), "÷", title=title)
    for found in measurements:
        plan = found.plan
        in_flight = f"{plan.hand_offs} × {_size(plan.nbytes)}, {plan.window} in flight"
        for kind, what in (("stream", in_flight), ("single", "one at a time")):
            rates = (f"{found.rate(kind, place):.2f}" for place in PLACES)
            table.add_row(str(plan.pairing), what, *rates, f"{found.ratio(kind):.2f}")
    Console().print(table)
