"""Nested mappings as plain data: dotted leaves and mutable copies."""

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is not itself a mapping."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def get_leaf(mapping: Mapping[str, Any], dotted: str) -> Any:
    """Return the value at a dotted key. Raises KeyError."""
    value: Any = mapping
    for key in dotted.split("."):
        value = value[key]
    return value


def with_leaves(mapping: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mutable copy in which each dotted key of ``changes`` holds its value."""
    copy: dict[str, Any] = thaw(mapping)
    for dotted, value in changes.items():
        *sections, last = dotted.split(".")
        section = copy
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return copy


def without_empty_sections(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy without mappings that hold nothing, however deep."""
    pruned = {
        key: without_empty_sections(value) if isinstance(value, Mapping) else value for key, value in mapping.items()
    }
    return {key: value for key, value in pruned.items() if value != {}}


def thaw(value: Any) -> Any:
    """Return a deeply mutable copy: mappings become dicts; tuples stay, as copies."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(thaw(item) for item in value)
    return value
