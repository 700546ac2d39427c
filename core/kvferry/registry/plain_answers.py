"""Copies what a hook answers into Python's own types, so that nothing of the plugin's runs when it is looked at."""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final

from kvferry.registry.quoting import quote

MOST_LEVELS: Final = 20
MOST_ITEMS: Final = 1000
"""Of one mapping or list."""

_PLAIN: Final = frozenset({str, bool, int, float, type(None)})
_LIKE: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)
"""Such as members of enumerations, and those that pretend to equal whatever they are compared with."""


class Strange:
    """Stands for a value of a type that no answer has."""

    def __init__(self, value: object) -> None:
        self._text = quote(value)

    def __repr__(self) -> str:
        """As it was quoted when the hook answered."""
        return self._text


def plain(value: Any, levels: int = MOST_LEVELS) -> Any:
    """Copy an answer.

    Args:
        value: whatever a hook returned.
        levels: how deep it may be.

    Raises:
        ValueError: it is too deep, contains itself, or has no end.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        pairs = _some(((key, value[key]) for key in value), levels)
        return {_key(key): plain(item, levels - 1) for key, item in pairs}
    if isinstance(value, list | tuple):
        items = [plain(item, levels - 1) for item in _some(value, levels)]
        return items if isinstance(value, list) else tuple(items)
    for kind, copy in _LIKE:
        if isinstance(value, kind):
            return copy(value)
    return Strange(value)


def _some(items: Any, levels: int) -> list[Any]:
    if not levels:
        raise ValueError(f"answers something that is more than {MOST_LEVELS} levels deep, or contains itself")
    some = list(islice(items, MOST_ITEMS + 1))
    if len(some) > MOST_ITEMS:
        raise ValueError(f"answers something with more than {MOST_ITEMS} entries, or without end")
    return some


def _key(key: object) -> object:
    copied = plain(key)
    return copied if type(copied) in _PLAIN or isinstance(copied, Strange) else Strange(key)
