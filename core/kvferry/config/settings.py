"""Every setting of the schema: its dotted key, type, default, and what its docstring says."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from pydantic import BaseModel

from kvferry.config.schema import EngineArgs
from kvferry.config.value_types import ValueType, value_type

NO_DEFAULT: Final = object()
"""The default of a setting that must be written."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the configuration."""

    key: str
    """Dotted; a field of a list's items too: ``peers.endpoint``."""
    name: str
    owner: type[BaseModel]
    type: ValueType
    default: Any
    """As JSON has it; of a section its own default, not that of its fields."""

    @property
    def meaning(self) -> str:
        """What its docstring says, as one line; empty where there is none."""
        return attribute_docstrings(self.owner).get(self.name, "")


def settings(model: type[BaseModel] = EngineArgs, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting, in the schema's order, a section before its fields."""
    for name, field in model.model_fields.items():
        kind = value_type(field)
        default = NO_DEFAULT if field.is_required() else _plain(field.get_default(call_default_factory=True))
        yield Setting(f"{prefix}{name}", name, model, kind, default)
        if kind.section is not None:
            yield from settings(kind.section, f"{prefix}{name}.")


@cache
def attribute_docstrings(cls: type) -> Mapping[str, str]:
    """The texts that stand below a class's annotated attributes, each as one line; read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    pairs = zip(body.body, body.body[1:], strict=False)
    found: dict[str, str] = {}
    for attribute, below in pairs:
        if not isinstance(attribute, ast.AnnAssign) or not isinstance(attribute.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[attribute.target.id] = " ".join(below.value.value.split())
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {}
    return list(value) if isinstance(value, tuple) else value
