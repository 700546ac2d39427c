"""``kvferry bench resolve``: the command and its table."""

from typing import TYPE_CHECKING

import click

from kvferry.cli.output import envelope, json_option, print_json, report_errors

if TYPE_CHECKING:
    from kvferry.bench.resolving import Decided, Growth


@click.command()
@report_errors
@click.option(
    "--distributions",
    type=click.IntRange(0),
    multiple=True,
    default=(0, 10, 300),
    show_default=True,
    help="Installed besides, with entry points that are not ours. Repeatable.",
)
@click.option(
    "--plugins",
    type=click.IntRange(1),
    multiple=True,
    default=(1, 100, 1000),
    show_default=True,
    help="Active model plugins, each of a distribution of its own. Repeatable.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Rounds that count.")
@json_option
def resolve(distributions: tuple[int, ...], plugins: tuple[int, ...], rounds: int, as_json: bool) -> None:
    """What `plugins list`, `explain` and one resolution cost, by what is installed."""
    from dataclasses import asdict

    from kvferry.bench.resolving import measure

    found, growth = measure(
        distributions, plugins, rounds, lambda text: None if as_json else click.echo(f"… {text}", err=True)
    )
    if as_json:
        print_json({**envelope(ok=True), "cases": [each.to_json() for each in found], "growth": asdict(growth)})
    else:
        _print(found, growth)


def _print(found: "list[Decided]", growth: "Growth") -> None:
    from rich.table import Table

    from kvferry.cli.bench_tables import wide_console

    table = Table(
        "distributions", "model plugins", "plugins list, ms", "imports", "explain, ms", "load, ms", "one resolution, ms"
    )
    for each in found:
        times = (each.explain_seconds, each.load_seconds, each.resolve_seconds)
        told = (f"{seconds * 1e3:.2f}" for seconds in times)
        imports = ", ".join(each.list_imports) or "none"
        table.add_row(str(each.distributions), str(each.plugins), f"{each.list_seconds * 1e3:.2f}", imports, *told)
    wide_console().print(table)
    click.echo(
        f"one more distribution: plugins list {growth.list_microseconds_a_distribution:.0f} µs, "
        f"explain {growth.explain_microseconds_a_distribution:.0f} µs\n"
        f"one more plugin: plugins list {growth.list_microseconds_a_plugin:.0f} µs, "
        f"explain {growth.explain_microseconds_a_plugin:.0f} µs (its import among them)\n"
        f"one resolution: {growth.resolve_microseconds_a_plugin_and_hook:.2f} µs a plugin and hook"
    )
