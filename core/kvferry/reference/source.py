"""What stands in the source of the contract: attributes, functions and docstrings, as their author wrote them."""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType

from kvferry.config.settings import attribute_docstrings

_NAMED = ("Args", "Attributes", "Raises")
"""Sections whose lines begin with a name."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """One annotated attribute of a class."""

    name: str
    annotation: str
    default: str
    """As written; empty where there is none."""
    meaning: str


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring in Google's style, taken apart."""

    paragraphs: tuple[str, ...] = ()
    sections: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """``Args``, ``Attributes``, … → name → text; a section without names has its text under the empty name."""

    @property
    def summary(self) -> str:
        """Its first paragraph."""
        return self.paragraphs[0] if self.paragraphs else ""


def attributes(cls: type) -> Iterator[Attribute]:
    """Yield a class's own annotated attributes, in order; private ones are nobody's business."""
    documented = attribute_docstrings(cls)
    for node in _definition(cls).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            annotation = ast.unparse(node.annotation).strip("'")
            yield Attribute(node.target.id, annotation, _default(node.value), documented.get(node.target.id, ""))


def signature(function: FunctionType) -> str:
    """Write a function's name, arguments and result as its author did, on one line; ``self`` is left out."""
    node = _definition(function)
    assert isinstance(node, ast.FunctionDef)
    node.args.args = [each for each in node.args.args if each.arg != "self"]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def read_docstring(text: str | None) -> Docstring:
    """Take a docstring apart: paragraphs, then sections of ``name: text`` lines."""
    paragraphs: list[str] = []
    sections: dict[str, dict[str, str]] = {}
    for block in inspect.cleandoc(text or "").split("\n\n"):
        head, _, rest = block.partition("\n")
        if head.endswith(":") and head[:-1].isalpha() and rest.startswith(" "):
            body = textwrap.dedent(rest)
            sections[head[:-1]] = _named(body) if head[:-1] in _NAMED else {"": " ".join(body.split())}
        elif block.strip():
            paragraphs.append(" ".join(block.split()))
    return Docstring(tuple(paragraphs), sections)


def _default(value: ast.expr | None) -> str:
    """Write a default; of a factory what it makes, an immutable mapping as a mapping."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        made = next((each.value for each in value.keywords if each.arg == "default_factory"), None)
        value = made.body if isinstance(made, ast.Lambda) else made
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "MappingProxyType":
        value = value.args[0]
    return ast.unparse(value) if value else ""


def _named(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    last = ""
    for line in text.splitlines():
        name, colon, rest = line.partition(": ")
        if colon and not line.startswith(" ") and name.replace(".", "").isidentifier():
            last = name
            found[last] = rest
        else:
            found[last] = f"{found.get(last, '')} {line.strip()}".strip()
    return found


def _definition(what: type | FunctionType) -> ast.ClassDef | ast.FunctionDef:
    node = ast.parse(textwrap.dedent(inspect.getsource(what))).body[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    return node
