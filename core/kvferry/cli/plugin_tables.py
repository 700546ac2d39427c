"""Plugin records as ``kvferry plugins`` shows them, to people and as JSON."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvferry.registry.records import plain_record
from kvferry.registry.toggles import CONFIGURATION, PROJECT, USER

if TYPE_CHECKING:
    from kvferry.registry.comparison import Compared
    from kvferry.registry.inspection import Inspected
    from kvferry.registry.records import PluginRecord
    from kvferry.registry.selection import Selection
    from kvferry.registry.state_file import LastState
    from kvferry.registry.toggles import Layer, Toggles

PIPE_COLUMNS = 240
"""Where nobody looks at a terminal, no line is folded."""
_FILES = {USER: "user file", PROJECT: "project file", CONFIGURATION: "configuration"}
_LAYER_FIELDS = ("source", "enable", "disable", "required", "prefer", "external_only")


def plain_plugin(record: "PluginRecord", last: "LastState | None") -> dict[str, Any]:
    """Describe one plugin for ``--json``."""
    return {**plain_record(record), "last": asdict(last) if last else None}


def plain_inspected(one: "Inspected", last: "LastState | None", selection: "Selection") -> dict[str, Any]:
    """Describe a plugin that was imported aside, for ``--json``."""
    return {
        **plain_plugin(one.record, last),
        "declares": [{"kind": made.kind, "name": made.name, "missing": made.missing} for made in one.declared],
        "problems": one.problems,
        "demands": list(_demands(selection, one.record.name)),
    }


def plain_selection(
    selection: "Selection",
    records: "Iterable[PluginRecord]",
    states: "Mapping[str, LastState]",
    toggles: "Toggles",
    compared: "Sequence[Compared] | None",
) -> dict[str, Any]:
    """Describe all plugins and what decides about them, for ``--json``."""
    beside = {each.name: each for each in compared or ()}
    items = [plain_plugin(record, states.get(record.name)) for record in records]
    if compared is not None:
        items = [{**item, **_beside(beside.pop(item["name"]))} for item in items]
        items += [{"name": name, "state": None, **_beside(each)} for name, each in sorted(beside.items())]
    preferred = {
        question: {"plugin": name, "by": selection.prefer_by[question]} for question, name in selection.prefer.items()
    }
    return {
        "plugins": items,
        "layers": [_plain_layer(layer) for layer in toggles.layers],
        "required": [asdict(each) for each in selection.required],
        "prefer": preferred,
    }


def _beside(each: "Compared") -> dict[str, Any]:
    return {"worker": each.there, "differences": each.differences}


def _plain_layer(layer: "Layer") -> dict[str, Any]:
    return {"layer": layer.kind, **{name: getattr(layer, name) for name in _LAYER_FIELDS}}


def print_selection(
    selection: "Selection",
    records: "Iterable[PluginRecord]",
    states: "Mapping[str, LastState]",
    toggles: "Toggles",
    compared: "Sequence[Compared] | None",
) -> None:
    """Print a table, one line a plugin, and below it what decides, and why some are off."""
    shown = list(records)
    if compared is None:
        headings = ["plugin", "state", "decided by", "origin", "distribution", "when last loaded"]
        _print_table(headings, [_row(record, states.get(record.name)) for record in shown])
    else:
        _print_table(["plugin", "here", "in the worker", "difference"], [_compared_row(each) for each in compared])
    blocks = (
        [f"{record.name}: {why}" for record in shown for why in _whys(record)],
        [line for record in shown for line in _demands(selection, record.name, f"{record.name}: ")],
        _layer_lines(toggles),
    )
    for block in filter(None, blocks):
        click.echo("\n" + "\n".join(block))


def _print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)


def _row(record: "PluginRecord", last: "LastState | None") -> Sequence[str]:
    return (record.name, record.state, _decided_by(record), record.origin, record.printed_distribution, _when(last))


def _compared_row(each: "Compared") -> Sequence[str]:
    here = f"{each.here.state}, {each.here.printed_distribution}" if each.here else "–"
    there = f"{each.there['state']}, {each.there['distribution']} {each.there['version'] or ''}" if each.there else "–"
    return (each.name, here, there.rstrip(), "; ".join(each.differences))


def _decided_by(record: "PluginRecord") -> str:
    """Name the layer in a word or two; the lines below the table have the path."""
    if record.decided_by is None:
        return "default"
    return _FILES.get(record.layer or "", record.decided_by)


def _whys(record: "PluginRecord") -> Iterator[str]:
    if record.reason:
        yield f"{record.state} {record.reason}" if record.decided_by and record.stage is None else record.reason
    elif record.decided_by:
        yield f"enabled by {record.decided_by}"
    yield from (f"its import {each}" for each in record.conduct)


def _demands(selection: "Selection", plugin: str, prefix: str = "") -> Iterator[str]:
    yield from (f"{prefix}required by {each.by}" for each in selection.required if each.name == plugin)
    for question, name in selection.prefer.items():
        if name == plugin:
            yield f"{prefix}preferred for {question} by {selection.prefer_by[question]}"


def _layer_lines(toggles: "Toggles") -> list[str]:
    if not toggles.layers:
        return []
    return ["layers, the last one that speaks of a plugin decides:", *(f"  {each.source}" for each in toggles.layers)]


def print_plugin(one: "Inspected", last: "LastState | None", selection: "Selection") -> None:
    """Print one plugin, one line a fact."""
    record = one.record
    seconds = record.import_seconds
    facts: dict[str, Iterable[str | None]] = {
        "plugin": [record.name],
        "distribution": [record.printed_distribution],
        "entry point": [record.entry_point],
        "origin": [record.origin],
        "rank": [record.rank.name.lower()],
        "state": [record.state],
        "why": [record.reason],
        "decided by": [record.decided_by or "nobody: on by itself"],
        "demanded": _demands(selection, record.name),
        "hooks": [", ".join(record.hooks)],
        "brings": (f"{made.kind} {made.name}" + _lacks(made.missing) for made in one.declared),
        "import": [f"{seconds * 1000:.1f} ms" if seconds is not None else None],
        "its import": record.conduct,
        "problem": one.problems,
        "cause": _nested(record.causes),
        "last loaded": [_loaded(last)],
        "last failure": _failure(last),
    }
    for fact, values in facts.items():
        for number, value in enumerate(filter(None, values)):
            click.echo(f"{fact + ':' if number == 0 else '':<14}{value}")


def _lacks(missing: Sequence[str]) -> str:
    return f" ({' and '.join(missing)} not installed)" if missing else ""


def _nested(causes: Iterable[str]) -> Iterator[str]:
    return ("  " * number + cause for number, cause in enumerate(causes))


def _loaded(last: "LastState | None") -> str:
    if last is None:
        return "never"
    took = f", in {last.import_seconds * 1000:.1f} ms" if last.import_seconds is not None else ""
    return f"{last.state}, {last.date}{took}" + (f": {last.reason}" if last.reason else "")


def _failure(last: "LastState | None") -> Iterator[str]:
    failure = last.failure if last else None
    if failure:
        yield f"{failure.date}, {failure.distribution}, {failure.stage}: {failure.reason}"
        yield from _nested(failure.causes)


def _when(last: "LastState | None") -> str:
    return f"{last.state}, {last.date[:10]}" if last else "never"
