"""What is going on, on stderr: a line that changes on a terminal, else a line a stage."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.status import Status


class ProgressView:
    """Shows the latest stage of each who reports."""

    def __init__(self, status: "Status | None") -> None:
        self._status = status
        self._last: dict[str, str] = {}

    def say(self, text: str) -> None:
        """Show a stage, ``WHO: WHAT``."""
        who, _, what = text.partition(": ")
        if self._last.get(who) == what:
            return
        self._last[who] = what
        if self._status is None:
            click.echo(text, err=True)
        else:
            from rich.text import Text  # a path may hold what rich would take for markup

            self._status.update(Text(" · ".join(f"{who}: {what}" for who, what in self._last.items())))

    def stage(self, stage: str, fraction: float | None) -> None:
        """Show a stage of this process; a fraction by tenths, so that a log stays short."""
        self.say(f"demo: {stage}" + (f", {int(fraction * 10) * 10} %" if fraction is not None else ""))


@contextmanager
def progress_view() -> Iterator[ProgressView]:
    """Show progress until the block ends."""
    if not sys.stderr.isatty():
        yield ProgressView(None)
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield ProgressView(status)
