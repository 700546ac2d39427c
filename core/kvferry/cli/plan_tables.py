"""A plan as people read it: what is built, who decided each setting, and what the configuration holds in the end."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

import click

if TYPE_CHECKING:
    from kvferry_plugins.types import Candidate, Decision, Plan

Row: TypeAlias = tuple[str, str, str, str, str]

SECTIONS = ("kv_cache_config", "cache_transceiver_config")

HEADINGS = ("setting", "value", "who decided", "why", "what lost")
GAP = 2
"""Spaces between columns."""
NARROW = 110
"""Columns below which a table of five would fold every word."""
WIDEST = 24
"""Characters of each of the first three columns, at most."""

_DECIDERS = {
    "default": "default",
    "fallback": "fallback",
    "user": "you",
    "model": "model",
    "environment": "environment",
}


def print_plan(plan: "Plan", *, model: str | None) -> None:
    """Print a plan: a headline, the decisions, the effective configuration.

    Args:
        plan: the plan.
        model: the checkpoint as the operator named it.
    """
    width = max(shutil.get_terminal_size().columns, 40)
    rows = [_cells(decision) for decision in plan.decisions]
    paragraphs = (
        [part for line in _headline(plan, model) for part in _folded(line, width, indent=" " * 13)],
        _blocks(rows, width) if width < NARROW else _table(rows, width),
        *(_summary(section, plan.effective[section], width) for section in SECTIONS),
    )
    click.echo("\n\n".join("\n".join(lines) for lines in paragraphs))


def written(value: object) -> str:
    """Write a value as YAML would."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(written(item) for item in value)}]"
    return str(value)


def _headline(plan: "Plan", model: str | None) -> Iterator[str]:
    where = f" ({model})" if model else ""
    redirected = plan.execution_architecture if plan.execution_architecture != plan.architecture else None
    run_as = f", run as {redirected}" if redirected else ""
    yield f"model        {plan.architecture or 'none known'}{where}{run_as}"
    yield f"KV cache     manager {plan.manager}, from {plan.providers.manager}"
    if plan.runtime is None:
        yield "transceiver  off"
    else:
        providers = f"{plan.providers.runtime} and {plan.providers.backend}"
        yield f"transceiver  {plan.runtime} on {plan.backend}, from {providers}"


def _table(rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield the lines of five columns; the first three are as wide as their contents, within bounds."""
    narrow = [min(max(len(row[column]) for row in (HEADINGS, *rows)), WIDEST) for column in range(3)]
    rest = width - sum(narrow) - GAP * 4
    widths = (*narrow, rest * 4 // 9, rest - rest * 4 // 9)
    for row in (HEADINGS, *rows):
        cells = [_folded(cell, column) for cell, column in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(column + GAP) for part, column in zip(parts, widths, strict=True))
            yield "".join(padded).rstrip()


def _blocks(rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield a block of lines a decision, for a terminal too narrow for columns."""
    for setting, value, who, why, lost in rows:
        yield from _folded(f"{setting}: {value}", width)
        losers = (f"lost: {line}" for line in lost.splitlines())
        for line in (f"{who}: {why}", *losers):
            yield from (f"  {part}" for part in _folded(line, width - 4, indent="  "))


def _folded(text: str, width: int, *, indent: str = "") -> list[str]:
    lines = text.splitlines() or [""]
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent=indent) or [""]]


def _cells(decision: "Decision") -> Row:
    requested, value = written(decision.requested), written(decision.value)
    return (
        decision.setting.rpartition(".")[2],
        value if requested == value else f"{requested} → {value}",
        _who(decision),
        decision.reason,
        "\n".join(_lost(candidate) for candidate in decision.candidates),
    )


def _who(decision: "Decision") -> str:
    decider = _DECIDERS[decision.source]
    return f"{decider}: {decision.by}" if decision.by else decider


def _lost(candidate: "Candidate") -> str:
    if candidate.value is None:
        return f"{candidate.source}: {candidate.reason}"
    by = candidate.by or candidate.source
    return f"{written(candidate.value)} ({by}): {candidate.reason}"


def _summary(name: str, section: Mapping[str, Any] | None, width: int) -> list[str]:
    values = "null" if section is None else ", ".join(f"{key} {written(value)}" for key, value in section.items())
    return _folded(f"{name}: {values}", width, indent="  ")
