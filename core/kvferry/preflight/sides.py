"""What is known of one side of a deployment before the two meet; plain data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from kvferry_plugins.layout import KvLayout
from kvferry_plugins.types import Role, ScheduleStyle

T = TypeVar("T")

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Fact:
    """What one side would say of one field of the handshake."""

    value: Any = None
    doubt: str = ""
    """Why it may say something else where it runs, or why nobody can tell; empty = it will say this."""
    known: bool = True
    """Whether ``value`` means anything."""


def unknown(why: str) -> Fact:
    """A field of which nothing is known; ``why`` says what would tell."""
    return Fact(None, why, known=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """What beyond the handshake's fields matters to a pair."""

    transceiver: Mapping[str, Any] | None
    """The effective ``cache_transceiver_config``; None = off."""
    cache: Mapping[str, Any]
    """The effective ``kv_cache_config``."""
    manager: str
    runtime: str | None
    styles: frozenset[ScheduleStyle] | None = None
    """That the runtime declares; None = nobody knows."""
    peers: tuple[str, ...] | None = None
    """Endpoints that may connect; None = nobody knows."""
    endpoint: str | None = None
    """Where a running worker's control socket listens."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side: a file that a worker is to be started from, or a worker that runs."""

    role: Role
    source: str
    """The file, or the worker's address, as the operator wrote it."""
    facts: Mapping[str, Fact]
    """By the handshake's names of the fields, and ``protocol``: [lowest, highest]."""
    settings: Settings
    running: bool = False
    locked: bool = False
    """Whether it refuses a peer whose plugins differ."""
    said_role: str | None = None
    """What a running worker says that it serves."""
    layouts: tuple[KvLayout, ...] | None = None
    """Of all its ranks, planned; None = nobody knows."""
    model: Path | None = None
    """The checkpoint that was given for it."""
    warnings: tuple[str, ...] = ()

    def fact(self, name: str) -> Fact:
        """What is known of a field."""
        return self.facts.get(name, unknown("this side says nothing of it"))


def both(get: Callable[[Side], T], context: Side, generation: Side) -> tuple[T, T]:
    """What two sides say of the same thing, the context side first."""
    return get(context), get(generation)
