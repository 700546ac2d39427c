"""What is known about one plugin: where it comes from, in which state it is, and why."""

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.registry.answers import Rank

INJECTED = "(injected)"
"""How the distribution of a plugin prints that no distribution brought."""


class Origin(enum.StrEnum):
    """Who brought a plugin."""

    BUILTIN = "built-in"
    EXTERNAL = "external"
    INJECTED = "injected"


RANK_OF_ORIGIN = {Origin.BUILTIN: Rank.BUILTIN, Origin.EXTERNAL: Rank.EXTERNAL, Origin.INJECTED: Rank.INJECTED}


class State(enum.StrEnum):
    """How far a plugin came."""

    DISCOVERED = "discovered"
    """Its metadata was read, its code was not."""
    DISABLED = "disabled"
    FAILED = "failed"
    ACTIVE = "active"
    UNAVAILABLE = "unavailable"
    """Loaded and asked, but no library of what it declares is installed here."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin, as operators see it."""

    name: str
    """Unique in a registry; ``distribution:name`` where two distributions claim one name."""
    distribution: str
    """Its distribution's name, or ``(injected)``."""
    version: str | None
    entry_point: str
    """The entry point's value, ``module`` or ``module:attribute``."""
    origin: Origin
    rank: Rank
    """Like the origin, but injected for whatever ``-p`` named."""
    state: State
    reason: str | None = None
    """Why it is disabled, failed or unavailable; one line."""
    decided_by: str | None = None
    """The file, variable or flag that enabled or disabled it; None = nobody did."""
    layer: str | None = None
    """Which layer of toggles that is: ``user``, ``project``, ``configuration``, ``environment`` or ``flag``."""
    stage: str | None = None
    """Of a failure: ``discovery``, ``import`` or ``registration``."""
    causes: tuple[str, ...] = ()
    """Of a failure: the whole chain, outermost first, ``Type: message``."""
    import_seconds: float | None = None
    hooks: tuple[str, ...] = ()
    conduct: tuple[str, ...] = ()
    """What its import did to the process beyond importing: each reads on from "its import …"."""

    @property
    def printed_distribution(self) -> str:
        """``acme-kvferry 1.0``, or ``(injected)``."""
        return f"{self.distribution} {self.version}" if self.version else self.distribution

    @property
    def is_active(self) -> bool:
        """Whether it is asked: an unavailable plugin still declares what it would bring."""
        return self.state in (State.ACTIVE, State.UNAVAILABLE)

    def describe(self) -> str:
        """Say its name, distribution, state and why, for an error that misses it."""
        why = f": {self.reason}" if self.reason else ""
        return f"{self.name} ({self.printed_distribution}) is {self.state}{why}"


def describe_inactive(records: Iterable[PluginRecord]) -> tuple[str, ...]:
    """Quote every plugin that is not active, with its state and why."""
    return tuple(record.describe() for record in records if not record.is_active)


def plain_record(record: PluginRecord) -> dict[str, Any]:
    """Describe one plugin by JSON's own values: what every verb and a worker's status say of it."""
    kinds = {"origin": str(record.origin), "rank": record.rank.name.lower(), "state": str(record.state)}
    lists = {name: list(getattr(record, name)) for name in ("causes", "hooks", "conduct")}
    return {**asdict(record), **kinds, **lists}
