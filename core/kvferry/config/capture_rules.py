"""What a field of the schema says about telemetry beyond its type: which words may be captured, or why none may."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Categories:
    """The words of a text field that may be captured by name; any other word is captured as ``other``."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NeverCaptured:
    """Keeps a field's value out of telemetry, whatever its type."""

    reason: str
    """What the value is, in a word or two: ``path``, ``address``."""
