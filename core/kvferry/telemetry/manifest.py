"""The committed list of every setting and of what may be captured of it; what is captured is what it says."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from kvferry.config.schema import EngineArgs
from kvferry.config.settings import NO_DEFAULT
from kvferry.telemetry.canonical import digest
from kvferry.telemetry.rules import Rule, rules

MANIFEST_VERSION: Final = 1
"""Grows when the manifest's own form changes."""

CAPTURE_VERSION: Final = 1
"""Grows when the form of what is captured changes."""

POLICY_VERSION: Final = 1
"""Grows when what may be captured at all changes: which kinds, not which fields."""

MANIFEST_FILE: Final = Path(__file__).with_name("manifest.json")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every setting's rule, and the names of kvferry's own plugins."""

    rules: Mapping[str, Rule]
    """Dotted key → its rule, in the schema's order."""
    plugins: tuple[str, ...]
    """Names of the plugins that kvferry brings, sorted: of any other, not even the name is captured."""

    def plain(self) -> dict[str, Any]:
        """Describe it as ``manifest.json`` holds it."""
        held = {
            "manifest": MANIFEST_VERSION,
            "capture": CAPTURE_VERSION,
            "policy": POLICY_VERSION,
            "fields": {key: rule.plain() for key, rule in self.rules.items()},
            "plugins": list(self.plugins),
        }
        return {**held, "digest": digest(held)}

    def text(self) -> str:
        """Write it as ``manifest.json``: one line a field, so that a diff shows what changed."""
        head = self.plain()
        fields = head.pop("fields").items()
        lines = [f"    {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields]
        listed = '  "fields": {\n' + ",\n".join(lines) + "\n  }"
        rest = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        return "{\n" + ",\n".join([*rest[:3], listed, *rest[3:]]) + "\n}\n"


@cache
def committed_manifest() -> Manifest:
    """Read the manifest that this installation brings."""
    held = json.loads(MANIFEST_FILE.read_text(encoding="utf-8"))
    return Manifest({key: _read(key, field) for key, field in held["fields"].items()}, tuple(held["plugins"]))


def generated_manifest(model: type[BaseModel] = EngineArgs) -> Manifest:
    """Make the manifest from the schema as it is, and from what kvferry's distribution declares."""
    return Manifest({rule.key: rule for rule in rules(model)}, own_plugins())


def own_plugins() -> tuple[str, ...]:
    """Name the plugins of kvferry's own distribution, sorted."""
    from importlib_metadata import distribution

    from kvferry_plugins import PROJECT_NAME

    entries = distribution(PROJECT_NAME).entry_points
    return tuple(sorted(entry.name for entry in entries if entry.group == PROJECT_NAME))


def differences(committed: Manifest, schema: Manifest) -> Iterator[str]:
    """Say of every setting how the committed manifest and the schema part."""
    for key in {**committed.rules, **schema.rules}:
        here, there = committed.rules.get(key), schema.rules.get(key)
        if here == there:
            continue
        if here is None or there is None:
            yield f"{key}: only in {'the schema' if here is None else 'the manifest'}"
            continue
        old, new = here.plain(), there.plain()
        parts = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
        yield f"{key}: " + ", ".join(
            f"{part} {old.get(part)!r} in the manifest, {new.get(part)!r} now" for part in parts
        )
    for name in sorted({*committed.plugins} ^ {*schema.plugins}):
        yield f"plugin {name}: only in {'the manifest' if name in committed.plugins else 'the distribution'}"


def _read(key: str, field: Mapping[str, Any]) -> Rule:
    return Rule(
        key, field["type"], field.get("default", NO_DEFAULT), field["capture"], values=tuple(field.get("values", ()))
    )
