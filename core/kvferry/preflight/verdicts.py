"""What preflight says of each field, as plain data."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvferry_plugins.types import Role


class Verdict(enum.StrEnum):
    """How a field is; the first is the worst."""

    FATAL = "fatal"
    """The two would refuse each other, or could not meet."""
    WARNING = "warning"
    """They would work together, and probably not as meant."""
    UNKNOWN = "unknown"
    """Nobody can tell before they run; never fine."""
    INFORMATION = "information"
    """Good to know."""
    FINE = "fine"
    """Compared, and alike enough."""


@dataclass(frozen=True, slots=True)
class Change:
    """One way to mend a field."""

    side: Role
    where: str
    """The file, or the address of the worker that is to be started again."""
    line: str
    """What to write there, as YAML, or what to do."""


@dataclass(frozen=True, slots=True)
class Checked:
    """One field, or one thing that only a pair shows."""

    field: str
    verdict: Verdict
    context: Any = None
    generation: Any = None
    reason: str = ""
    """What it means, what to do, or what would tell; lower case."""
    changes: tuple[Change, ...] = ()
    """Each alone is enough; the first is the nearest."""

    def __str__(self) -> str:
        """One paragraph."""
        values = f"{self.context!r} at the context side, {self.generation!r} at the generation side"
        said = f"{self.field}: {values}" if self.verdict is not Verdict.UNKNOWN else self.field
        ways = " or ".join(f"in {change.where}: {change.line}" for change in self.changes)
        return "; ".join(part for part in (said, self.reason, ways) if part)


def in_order(checked: Iterable[Checked]) -> list[Checked]:
    """Sort by verdict, the worst first; within one as they came."""
    return sorted(checked, key=lambda each: list(Verdict).index(each.verdict))


def count(checked: Iterable[Checked]) -> dict[str, int]:
    """Count them by verdict, those that are not there too."""
    verdicts = [each.verdict for each in checked]
    return {verdict.value: verdicts.count(verdict) for verdict in Verdict}
