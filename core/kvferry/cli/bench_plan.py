"""``kvferry bench plan``: the command and its table."""

from typing import TYPE_CHECKING

import click

from kvferry.cli.output import envelope, json_option, print_json, report_errors

if TYPE_CHECKING:
    from kvferry.bench.planning import Planned


@click.command()
@report_errors
@click.option(
    "--blocks",
    type=click.IntRange(1),
    multiple=True,
    default=(12_500, 25_000, 50_000, 100_000),
    show_default=True,
    help="Of one hand-off. Repeatable.",
)
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True, help="Rounds that count.")
@click.option("--seed", type=int, default=2026, show_default=True, help="Of the shuffled tables.")
@json_option
def plan(blocks: tuple[int, ...], rounds: int, seed: int, as_json: bool) -> None:
    """Time and memory that planning takes, a block, by number of blocks: nothing is moved."""
    from kvferry.bench.planning import measure

    found = [each for count in blocks for each in measure(count, rounds, seed)]
    if as_json:
        print_json({**envelope(ok=True), "plans": [each.to_json() for each in found]})
    else:
        _print(found)


def _print(found: "list[Planned]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("planner", "block tables", "blocks", "µs a block", "bytes a block", "segments")
    for each in sorted(found, key=lambda each: (each.planner, each.order, each.blocks)):
        figures = f"{each.microseconds_a_block:.3f}", f"{each.bytes_a_block:.0f}", f"{each.segments:,}"
        table.add_row(each.planner, each.order, f"{each.blocks:,}", *figures)
    Console().print(table)
