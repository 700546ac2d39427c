"""What can go wrong with one scripted transfer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drop:
    """Nothing is written, and no completion ever comes."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The bytes arrive, and the same completion is reported twice."""


@dataclass(frozen=True, slots=True)
class FailPost:
    """``submit`` raises TransferError; nothing was posted."""


@dataclass(frozen=True, slots=True)
class FailAfter:
    """So many segments arrive, then the transfer completes with an error."""

    segments: int = 0


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The bytes arrive, one of them inverted; the completion says ok."""

    offset: int = 0
    """Which byte, counted over all segments."""


Ending = Drop | Duplicate | FailAfter | Corrupt


@dataclass(frozen=True, slots=True)
class Delay:
    """It goes on after so many polls of the writer and so many seconds, whichever is later."""

    polls: int = 0
    seconds: float = 0.0
    written: int = 0
    """Segments that arrive at once; the rest arrive at the end."""
    then: Ending | None = None
    """How it ends; None = well."""


@dataclass(frozen=True, slots=True)
class Hold:
    """It goes on when the test calls ``release`` on the writer."""

    written: int = 0
    """Segments that arrive at once; the rest arrive after the release."""
    then: Ending | None = None
    """How it ends; None = well."""


Fault = Ending | FailPost | Delay | Hold
