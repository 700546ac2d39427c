"""Plugin records as ``kvferry plugins`` shows them, to people and as JSON."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvferry.registry.records import PluginRecord
    from kvferry.registry.state_file import LastState


def plain_plugin(record: "PluginRecord", last: "LastState | None") -> dict[str, object]:
    """Describe one plugin for ``--json``."""
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "entry_point": record.entry_point,
        "origin": str(record.origin),
        "rank": record.rank.name.lower(),
        "state": str(record.state),
        "decided_by": record.decided_by,
        "reason": record.reason,
        "stage": record.stage,
        "causes": list(record.causes),
        "import_seconds": record.import_seconds,
        "hooks": list(record.hooks),
        "last": asdict(last) if last else None,
    }


def print_plugins(records: "Iterable[PluginRecord]", states: "Mapping[str, LastState]") -> None:
    """Print a table, one line a plugin, and below it why some are off."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("plugin", "state", "origin", "distribution", "when last loaded"):
        table.add_column(heading, overflow="fold")
    shown = list(records)
    for record in shown:
        cells = (record.name, record.state, record.origin, record.printed_distribution, _when(states.get(record.name)))
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)
    explained = [f"{record.name}: {why}" for record in shown if (why := _why(record))]
    click.echo("\n".join(["", *explained]) if explained else "", nl=bool(explained))


def print_plugin(record: "PluginRecord", last: "LastState | None") -> None:
    """Print one plugin, one line a fact."""
    seconds = record.import_seconds
    facts = {
        "plugin": record.name,
        "distribution": record.printed_distribution,
        "entry point": record.entry_point,
        "origin": str(record.origin),
        "state": str(record.state),
        "why": record.reason,
        "decided by": record.decided_by or "nobody: on by itself",
        "hooks": ", ".join(record.hooks) or None,
        "import": f"{seconds * 1000:.1f} ms" if seconds is not None else None,
        "last loaded": f"{last.state}, {last.date}" + (f": {last.reason}" if last.reason else "") if last else "never",
    }
    for fact, value in facts.items():
        if value:
            click.echo(f"{fact + ':':<14}{value}")
    for number, cause in enumerate(record.causes):
        click.echo(f"{'cause:' if number == 0 else '':<14}{'  ' * number}{cause}")


def _why(record: "PluginRecord") -> str:
    if record.reason:
        return f"{record.state} {record.reason}" if record.decided_by else record.reason
    return f"enabled by {record.decided_by}" if record.decided_by else ""


def _when(last: "LastState | None") -> str:
    return f"{last.state}, {last.date[:10]}" if last else "never"
