"""The types of the settings, read from the schema: what each may hold, in words that a person uses."""

import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Base = Literal["boolean", "integer", "number", "text", "category", "list", "mapping", "section", "other"]

_BASES: Final[dict[object, Base]] = {bool: "boolean", int: "integer", float: "number", str: "text", dict: "mapping"}
_SIGNS: Final = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


@dataclass(frozen=True, slots=True)
class ValueType:
    """What one setting may hold."""

    base: Base
    nullable: bool = False
    limits: tuple[str, ...] = ()
    """Of a number: ``> 0``."""
    values: tuple[Any, ...] = ()
    """Of a category: its words, true and false among them."""
    item: "ValueType | None" = None
    """Of a list: its items."""
    section: type[BaseModel] | None = None
    """Of a section, or of a list's: the model that it is."""
    markers: tuple[object, ...] = ()
    """What else the annotation carries."""

    def __str__(self) -> str:
        """Name it: ``integer > 0 or null``."""
        name = f"list of {self.item}" if self.item else " or ".join(map(_written, self.values)) or self.base
        limited = " and ".join((f"{name} {self.limits[0]}", *self.limits[1:])) if self.limits else name
        return f"{limited} or null" if self.nullable else limited


def value_type(field: FieldInfo) -> ValueType:
    """Read a field's type from its annotation and what pydantic took out of it."""
    return _read(field.annotation, field.metadata)


def _read(annotation: Any, metadata: Iterable[object] = ()) -> ValueType:
    annotation, markers = _unwrapped(annotation, metadata)
    parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    kept = [part for part in parts if part is not type(None)]
    if len(kept) > 1:
        return ValueType("other", markers=markers)
    only, inner = _unwrapped(kept[0], ())
    return _one(only, (*markers, *inner), nullable=len(kept) < len(parts))


def _one(annotation: Any, markers: tuple[object, ...], *, nullable: bool) -> ValueType:
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        return ValueType("category", nullable, values=get_args(annotation), markers=markers)
    if origin in (tuple, list):
        item = _read(get_args(annotation)[0])
        return ValueType("list", nullable, item=item, section=item.section, markers=markers)
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return ValueType("section", nullable, section=origin, markers=markers)
    return ValueType(_BASES.get(origin, "other"), nullable, _limits(markers), markers=markers)


def _unwrapped(annotation: Any, metadata: Iterable[object]) -> tuple[Any, tuple[object, ...]]:
    """Take ``Annotated`` apart; what a ``Field`` within it says is spread out."""
    found = list(metadata)
    if get_origin(annotation) is Annotated:
        annotation, *carried = get_args(annotation)
        found += carried
    spread = (each.metadata if isinstance(each, FieldInfo) else (each,) for each in found)
    return annotation, tuple(marker for markers in spread for marker in markers)


def _limits(markers: Iterable[object]) -> tuple[str, ...]:
    return tuple(
        f"{sign} {limit:g}"
        for marker in markers
        for name, sign in _SIGNS.items()
        if isinstance(limit := getattr(marker, name, None), int | float)
    )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
