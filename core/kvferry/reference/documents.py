"""Which files are generated, by what, and how they differ from what lies there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from kvferry.reference.command_line import command_line_page
from kvferry.reference.configuration import configuration_page
from kvferry.reference.decisions import decisions_page
from kvferry.reference.errors import errors_page
from kvferry.reference.hooks import hooks_page
from kvferry.reference.json_schema import engine_schema_text
from kvferry.reference.telemetry import telemetry_page
from kvferry.telemetry.manifest import generated_manifest

DOCUMENTS: Final[Mapping[str, Callable[[], str]]] = {
    "core/kvferry/telemetry/manifest.json": lambda: generated_manifest().text(),
    "docs/telemetry.md": telemetry_page,
    "docs/reference/command-line.md": command_line_page,
    "docs/reference/configuration.md": configuration_page,
    "docs/reference/decisions.md": decisions_page,
    "docs/reference/engine.schema.json": engine_schema_text,
    "docs/reference/errors.md": errors_page,
    "docs/reference/hooks.md": hooks_page,
}
"""Path within the repository → what writes its text."""


def outdated(root: Path) -> dict[str, str]:
    """Generate everything and return what differs from what lies under ``root``: path → the text it should have."""
    texts = {path: make() for path, make in DOCUMENTS.items()}
    return {path: text for path, text in texts.items() if _read(root / path) != text}


def write(root: Path) -> list[str]:
    """Write what differs; return those paths."""
    texts = outdated(root)
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return list(texts)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
