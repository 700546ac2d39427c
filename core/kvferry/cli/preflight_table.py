"""A comparison as people read it: a table of the fields, the worst first, each with what to do."""

import reprlib
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvferry.cli.output import printable
from kvferry.cli.plan_tables import written
from kvferry.preflight.verdicts import Verdict, count

if TYPE_CHECKING:
    from kvferry.preflight.sides import Side
    from kvferry.preflight.verdicts import Checked

_COLOURS = {
    Verdict.FATAL: "red",
    Verdict.WARNING: "yellow",
    Verdict.UNKNOWN: "magenta",
    Verdict.INFORMATION: "cyan",
    Verdict.FINE: "green",
}
_VERDICT = 13
"""Columns of the verdict."""
_NAMED = "unknown", "fine"
_NARROWEST = 12
"""Columns of a value below which values stand in lines of their own."""
_PAIRS = 3
"""Of a mapping that are shown."""
_DIGEST = 12
"""Characters of a digest that are shown."""

_short = reprlib.Repr()
_short.maxdict = _short.maxlist = 3
_short.maxstring = _short.maxother = 60


def print_comparison(sides: "tuple[Side, Side]", checked: "Sequence[Checked]") -> None:
    """Print both sides, every field, and how many there are of each verdict."""
    width = max(shutil.get_terminal_size().columns, 60)
    for side in sides:
        click.echo("\n".join(_folded(_side(side), width, first=side.role.value)))
    click.echo()
    name = max([len("field"), *(len(each.field) for each in checked)]) + 2
    value = (width - _VERDICT - name - 2) // 2
    if value >= _NARROWEST:
        click.echo(f"{'verdict':<{_VERDICT}}{'field':<{name}}{'context':<{value + 2}}generation")
    for each in _together(checked):
        click.echo("\n".join(_lines(each, name, value, width)))
    click.echo(f"\n{summary(checked)}")


def _together(checked: "Sequence[Checked]") -> "list[Checked]":
    """Join what nobody can tell for one and the same reason into one row, where the first one stood."""
    alike: dict[tuple[str, str], list[Checked]] = {}
    for each in checked:
        joined = each.verdict is Verdict.UNKNOWN and not each.changes
        alike.setdefault(("", each.reason) if joined else (each.field, ""), []).append(each)
    return [
        same[0] if len(same) == 1 else replace(same[0], field=", ".join(each.field for each in same))
        for same in alike.values()
    ]


def summary(checked: "Sequence[Checked]") -> str:
    """``1 fatal, 2 unknown, 12 fine``."""
    return ", ".join(f"{number} {verdict}" for verdict, number in count(checked).items() if number)


def _side(side: "Side") -> str:
    if side.settings.runtime is None:
        runs = "transceiver off"
    else:
        runs = f"{side.settings.runtime} on {side.fact('backend').value}"
    state = "running" if side.running else "not started"
    return f"{side.source} ({state}): {runs}, manager {side.settings.manager}" + (
        f", {side.model}" if side.model else ""
    )


def _lines(each: "Checked", name: int, value: int, width: int) -> Iterator[str]:
    label = click.style(each.verdict.value.ljust(_VERDICT), fg=_COLOURS[each.verdict])
    if ", " in each.field:
        names, *more = _folded(each.field, width)
        yield f"{label}{names.strip()}"
        yield from (*more, *_folded(each.reason, width))
        return
    yield from _row(each, label, name, value, width)
    if each.reason:
        yield from _folded(each.reason, width)
    ways = ("in", "or in")
    for number, change in enumerate(each.changes):
        yield from _folded(f"{ways[min(number, 1)]} {change.where}: {change.line}", width)


def _row(each: "Checked", label: str, name: int, value: int, width: int) -> Iterator[str]:
    """Yield a field and its values, in columns where there is room for them."""
    first, second = _values(each)
    if value < _NARROWEST:
        yield f"{label}{each.field}"
        yield from _folded(f"context {first}, generation {second}", width)
        return
    columns = [textwrap.wrap(printable(text), value, break_on_hyphens=False) or [""] for text in (first, second)]
    for number in range(max(map(len, columns))):
        left, right = (column[number] if number < len(column) else "" for column in columns)
        head = f"{label}{each.field:<{name}}" if number == 0 else " " * (_VERDICT + name)
        yield f"{head}{left:<{value + 2}}{right}".rstrip()


def _values(each: "Checked") -> tuple[str, str]:
    """Both values, cut down; of two mappings only what differs."""
    context, generation = each.context, each.generation
    if isinstance(context, Mapping) and isinstance(generation, Mapping) and context != generation:
        names = [name for name in sorted({**context, **generation}) if context.get(name) != generation.get(name)]
        context, generation = ({name: side.get(name) for name in names} for side in (context, generation))
    return _value(each, context), _value(each, generation)


def _value(each: "Checked", value: object) -> str:
    if value is None and each.verdict is Verdict.UNKNOWN:
        return "?"
    if isinstance(value, Mapping):
        return f"{len(value)}, alike" if each.verdict in _NAMED else ", ".join(_pairs(value))
    if isinstance(value, str) and each.field in ("model.config", "model.weights"):
        return value[:_DIGEST] if len(value) == 64 else value
    if isinstance(value, list | tuple):
        is_text = all(isinstance(each, str) for each in value)
        return ", ".join(value) if is_text else _short.repr(value)
    return written(value)


def _pairs(value: Mapping[str, object]) -> list[str]:
    pairs = [f"{name}: {written(each)}" for name, each in value.items()]
    return pairs if len(pairs) <= _PAIRS else [*pairs[:_PAIRS], f"and {len(pairs) - _PAIRS} more"]


def _folded(text: str, width: int, *, first: str = "") -> list[str]:
    indent = " " * _VERDICT
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=first.ljust(_VERDICT),
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
