"""A plan as people read it: what is built, who decided each setting, and what the configuration holds in the end."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from kvferry_plugins.types import Candidate, Decision, Plan

HEADINGS = ("setting", "value", "who decided", "why", "what lost")
NARROW = 100
"""Columns below which a table of five would fold every word."""

_NOBODY = {"default": "default", "fallback": "fallback", "user": "you", "model": "model", "environment": "environment"}


def print_plan(plan: "Plan", *, model: str | None) -> None:
    """Print a plan: a headline, the decisions, the effective configuration.

    Args:
        plan: the plan.
        model: the checkpoint as the operator named it.
    """
    from rich.console import Console

    console = Console(highlight=False)
    for line in _headline(plan, model):
        console.print(line, markup=False)
    console.print()
    (_print_blocks if console.width < NARROW else _print_table)(console, plan)
    for section in ("kv_cache_config", "cache_transceiver_config"):
        console.print()
        console.print(f"{section}: {_summary(plan.effective[section])}", markup=False)


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


def _print_table(console: "Console", plan: "Plan") -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, ratio in zip(HEADINGS, (None, None, None, 3, 4), strict=True):
        table.add_column(heading, overflow="fold", ratio=ratio, max_width=None if ratio else 30)
    for decision in plan.decisions:
        table.add_row(*(Text(cell) for cell in _cells(decision)))
    console.print(table)


def _print_blocks(console: "Console", plan: "Plan") -> None:
    """Print one block a decision, for a terminal too narrow for columns."""
    for decision in plan.decisions:
        setting, value, who, why, lost = _cells(decision)
        console.print(f"{setting}: {value}", markup=False)
        console.print(f"  {who}: {why}", markup=False)
        for line in lost.splitlines():
            console.print(f"  lost: {line}", markup=False)


def _cells(decision: "Decision") -> tuple[str, str, str, str, str]:
    requested, value = written(decision.requested), written(decision.value)
    return (
        decision.setting.rpartition(".")[2],
        value if requested == value else f"{requested} → {value}",
        _who(decision),
        decision.reason,
        "\n".join(_lost(candidate) for candidate in decision.candidates),
    )


def _who(decision: "Decision") -> str:
    nobody = _NOBODY[decision.source]
    return f"{nobody}: {decision.by}" if decision.by else nobody


def _lost(candidate: "Candidate") -> str:
    if candidate.value is None:
        return f"{candidate.source}: {candidate.reason}"
    by = candidate.by or candidate.source
    return f"{written(candidate.value)} ({by}): {candidate.reason}"


def _summary(section: Mapping[str, Any] | None) -> str:
    if section is None:
        return "null"
    return ", ".join(f"{key} {written(value)}" for key, value in section.items())
