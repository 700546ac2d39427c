"""Which settings may be captured, read from the schema's types: text never, unless its words are listed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from kvferry.config.capture_rules import Categories, NeverCaptured
from kvferry.config.schema import EngineArgs
from kvferry.config.settings import NO_DEFAULT, Setting, settings
from kvferry.config.value_types import ValueType

CATEGORY: Final = "category"
BOOLEAN: Final = "boolean"
NUMBER: Final = "number"
NUMBERS: Final = "numbers"
NEVER: Final = "never: "
"""Followed by what the value is."""

_NUMERIC: Final = ("integer", "number")


@dataclass(frozen=True, slots=True)
class Rule:
    """One field of the manifest: what it is, and what of it may be captured."""

    key: str
    type: str
    default: Any
    """As JSON has it; ``NO_DEFAULT`` where the setting must be written."""
    capture: str
    """``category``, ``boolean``, ``number``, ``numbers``, or ``never: `` and what the value is."""
    values: tuple[str | bool, ...] = ()
    """Of a category: what is captured as it is."""

    @property
    def is_captured(self) -> bool:
        """Whether any of its values may be captured."""
        return not self.capture.startswith(NEVER)

    def plain(self) -> dict[str, Any]:
        """Describe it as the manifest does."""
        default = {} if self.default is NO_DEFAULT else {"default": self.default}
        values = {"values": list(self.values)} if self.values else {}
        return {"type": self.type, **default, "capture": self.capture, **values}


def rules(model: type[BaseModel] = EngineArgs) -> Iterator[Rule]:
    """Yield one rule a setting, in the schema's order."""
    return map(_rule, settings(model))


def _rule(setting: Setting) -> Rule:
    capture = capture_of(setting.type)
    values = _words(setting.type) if capture == CATEGORY else ()
    return Rule(setting.key, str(setting.type), setting.default, capture, values)


def capture_of(kind: ValueType) -> str:
    """Say what of a type may be captured."""
    forbidden = [marker.reason for marker in kind.markers if isinstance(marker, NeverCaptured)]
    if forbidden:
        return f"{NEVER}{forbidden[0]}"
    if _words(kind):
        return CATEGORY
    if kind.base == "boolean":
        return BOOLEAN
    if kind.base in _NUMERIC:
        return NUMBER
    if kind.item is not None:
        return NUMBERS if capture_of(kind.item) == NUMBER else f"{NEVER}list of {kind.item.base}"
    return f"{NEVER}{'free text' if kind.base == 'text' else kind.base}"


def _words(kind: ValueType) -> tuple[str | bool, ...]:
    if kind.base == "category":
        return tuple(value for value in kind.values if isinstance(value, str | bool))
    return next((marker.values for marker in kind.markers if isinstance(marker, Categories)), ())
