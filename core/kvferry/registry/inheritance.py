"""Whether a worker has the plugins of the process that started it: told and compared through the environment."""

import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from kvferry.registry.door import Registry
from kvferry.registry.plugin_set import plugin_digests, plugin_set_digest
from kvferry_plugins.errors import PluginLoadError

VARIABLE = "KVFERRY_PARENT_PLUGINS"
"""What a parent puts into the environment of those that it starts, as JSON."""

VERSION = 1
MOST_BYTES = 64 << 10
"""Of the variable: the kernel starts nobody with one of 128 KiB. A larger set is told by its digest alone."""

ADVICE = (
    "start it with the same -p flags, KVFERRY_* variables, kvferry.toml and installation as its parent; a worker that "
    "is --locked is refused"
)


@dataclass(frozen=True, slots=True)
class PluginDifference:
    """One plugin that the two processes do not have alike."""

    plugin: str
    """Its name; empty where only the sets' digests are known."""
    parent: str | None
    """Its distribution there, as printed; None = it is not on."""
    here: str | None

    def __str__(self) -> str:
        there, here = self.parent or "not on", self.here or "not on"
        return f"plugin {self.plugin!r}: {there} in the parent, {here} here"


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a parent said of its plugins, beside what is here."""

    pid: int
    """The parent's."""
    differences: tuple[PluginDifference, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line a plugin that differs; one for all those of a distribution that differ in their files alone."""
        return tuple(
            f"{line}; the parent is process {self.pid}, which started this worker: {ADVICE}" for line in self._lines()
        )

    def _lines(self) -> list[str]:
        if any(not each.plugin for each in self.differences):
            return ["the plugins are others than the parent's (too many to be told by name)"]
        of_files: dict[str, list[str]] = {}
        for each in self.differences:
            if each.parent is not None and each.parent == each.here:
                of_files.setdefault(each.parent, []).append(each.plugin)
        return [
            *(str(each) for each in self.differences if each.parent != each.here),
            *(f"{printed} has other files than in the parent (of {', '.join(of)})" for printed, of in of_files.items()),
        ]

    def dump(self) -> dict[str, object]:
        """Plain values for ``/status``: ``plugins`` is ``same``, or what differs."""
        listed = [{"plugin": each.plugin, "parent": each.parent, "here": each.here} for each in self.differences]
        return {"pid": self.pid, "plugins": listed or "same"}

    def require_same(self) -> None:
        """Refuse a difference, of a worker that is locked. Raises PluginLoadError."""
        if self.differences:
            told = " · ".join(self._lines())
            raise PluginLoadError(
                f"this worker is locked, and its plugins are not those of process {self.pid}, which started it: "
                f"{told}; {ADVICE}",
                plugin=self.differences[0].plugin or None,
            )


def announce_plugin_set(registry: Registry, environ: MutableMapping[str, str]) -> None:
    """Tell those that are started with ``environ`` which plugins this process has.

    Args:
        registry: this process's.
        environ: what they get; this process's own, or a copy of it.
    """
    digests = plugin_digests(registry)
    told: dict[str, Any] = {"version": VERSION, "pid": os.getpid(), "set": plugin_set_digest(registry, digests)}
    whole = json.dumps({**told, "plugins": registry.plugin_set(), "digests": digests}, separators=(",", ":"))
    environ[VARIABLE] = whole if len(whole) <= MOST_BYTES else json.dumps(told)


def inheritance_of(registry: Registry, environ: Mapping[str, str]) -> Inheritance | None:
    """Compare this process's plugins with those of the one that started it.

    Returns:
        None where nobody announced any, or in words that this version does not know.
    """
    told = _told(environ.get(VARIABLE))
    if told is None:
        return None
    digests = plugin_digests(registry)
    if plugin_set_digest(registry, digests) == told["set"]:
        return Inheritance(told["pid"])
    if "plugins" not in told:
        return Inheritance(told["pid"], (PluginDifference("", None, None),))
    return Inheritance(told["pid"], tuple(_differences(told, registry.plugin_set(), digests)))


def _differences(
    told: Mapping[str, Any], here: Mapping[str, str], digests: Mapping[str, str]
) -> Iterator[PluginDifference]:
    there: Mapping[str, str] = told["plugins"]
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name) or told["digests"].get(name) != digests.get(name):
            yield PluginDifference(name, there.get(name), here.get(name))


def _told(text: str | None) -> dict[str, Any] | None:
    """What a parent said; None for what is none of ours."""
    try:
        told = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and _is_whole(told) else None


def _is_whole(told: Mapping[str, Any]) -> bool:
    sections = [told[name] for name in ("plugins", "digests") if name in told]
    return (
        told.get("version") == VERSION
        and isinstance(told.get("pid"), int)
        and isinstance(told.get("set"), str)
        and len(sections) in (0, 2)
        and all(isinstance(each, dict) and all(isinstance(v, str) for v in each.values()) for each in sections)
    )
