"""What the door hands out: a plugin's answer, with who gave it and how it ranks."""

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Rank(enum.IntEnum):
    """Who wins: injected (``-p``, a harness) over external over built-in."""

    BUILTIN = 0
    EXTERNAL = 1
    INJECTED = 2


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """One plugin's answer to one question."""

    plugin: str
    distribution: str
    """As printed: ``acme-kvferry 1.0``, or ``(injected)``."""
    rank: Rank
    value: T
