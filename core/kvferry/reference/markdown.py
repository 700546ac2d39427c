"""Pieces of a generated page."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

NOTICE: Final = "<!-- Generated from {source} by `make generated`: change that, not this. -->"


def page(title: str, source: str, *parts: str) -> str:
    """Join a page: its title, a note that it is generated, and its parts with an empty line between them."""
    whole = (f"# {title}", NOTICE.format(source=source), *parts)
    return "\n\n".join(part.strip("\n") for part in whole if part) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table; bars within cells are escaped."""
    lines = [_row(headings), _row(["---"] * len(headings)), *map(_row, rows)]
    return "\n".join(lines)


def bullets(items: Iterable[str]) -> str:
    """Lay out a list."""
    return "\n".join(f"- {item}" for item in items)


def code(text: object) -> str:
    """Set a text as code."""
    return f"`{text}`"


def yaml_value(value: object) -> str:
    """Write a value as YAML's author knows it, as code; nothing in a list or section is ``empty``."""
    if value in ((), [], {}):
        return "empty"
    named = {None: "null", True: "true", False: "false"}
    return code(named[value] if value is None or isinstance(value, bool) else value)


def prose(docstring: str) -> str:
    """Turn a docstring's code marks into Markdown's."""
    return re.sub(r"(?<!`)``([^`]+)``(?!`)", r"`\1`", docstring)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
