"""Findings as people read them: by area, the worst first, each with its cause and what to do."""

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import click

from kvferry.cli.output import printable
from kvferry.doctor.findings import Finding, Severity, count, together

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "cyan", Severity.OK: "green"}
_INDENT = 2
_SEVERITY = 9
"""Columns of the severity."""


def print_findings(findings: Sequence[Finding]) -> None:
    """Print them, and how many there are of each kind."""
    findings = together(findings)
    width = max(shutil.get_terminal_size().columns, 60)
    for area, found in groupby(findings, key=lambda finding: finding.area):
        click.echo(click.style(area.value, bold=True))
        for finding in found:
            click.echo("\n".join(_lines(finding, width)))
        click.echo()
    click.echo(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    """``2 errors, 1 warning``, or that there is nothing wrong."""
    counts = count(findings)
    parts = [_counted(counts[each], each.value) for each in (Severity.ERROR, Severity.WARNING) if counts[each]]
    return ", ".join(parts) if parts else "no error, no warning"


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield what tells progress on stderr: a line that moves on a terminal, a line a stage elsewhere."""
    if not sys.stderr.isatty():
        yield lambda stage: click.echo(f"progress: {stage}", err=True)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("looking around") as status:
        yield lambda stage: status.update(escape(stage))


def _lines(finding: Finding, width: int) -> Iterator[str]:
    label = click.style(finding.severity.value.ljust(_SEVERITY), fg=_COLOURS[finding.severity])
    first, *more = _folded(f"{finding.subject}: {finding.what}", width)
    yield f"{' ' * _INDENT}{label}{first}"
    yield from (_indented(line) for line in more)
    for name, text in (("cause", finding.cause), ("fix", finding.fix)):
        if text:
            yield from (_indented(line) for line in _folded(f"{name}: {text}", width))


def _folded(text: str, width: int) -> list[str]:
    room = width - _INDENT - _SEVERITY
    return textwrap.wrap(printable(text), room, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _indented(line: str) -> str:
    return f"{' ' * (_INDENT + _SEVERITY)}{line}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
