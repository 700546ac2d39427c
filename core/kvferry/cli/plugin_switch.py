"""``kvferry plugins enable|disable``: which file is written, with what, and who overrules it; no plugin is imported."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli.options import make_toggles
from kvferry.folders import working_folder
from kvferry.whole_files import one_writer
from kvferry_plugins.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.registry.records import PluginRecord


@dataclass(frozen=True, slots=True)
class Switched:
    """What was done."""

    name: str
    """As the file spells it: a plugin, or a distribution whose plugins are meant."""
    plugins: tuple[str, ...]
    """The plugins that it is about."""
    file: Path
    changed: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Target:
    name: str
    plugins: tuple[str, ...]
    is_meant: Callable[[str], bool]


def switch(name: str, where: str | None, *, enabled: bool) -> Switched:
    """Turn a plugin, or all plugins of a distribution, on or off in a file.

    Args:
        name: of the plugin, the distribution, or ``distribution:name``.
        where: ``user`` or ``project``; None = the project's file if there is one, else the user's.
        enabled: what is wanted.

    Raises:
        ConfigError: there is no such plugin, or the file cannot be read or written.
    """
    path = _toggle_file(where)
    try:
        with one_writer(path):
            before = _contents(path)
            target = _target(name.strip(), path, enabled=enabled)
            _write(path, target, enabled=enabled)
            changed = _contents(path) != before
    except TimeoutError as error:
        raise ConfigError(f"{error}; try again, or end that one") from error
    return Switched(target.name, target.plugins or (target.name,), path, changed, _overruled(target, path, enabled))


def _target(name: str, path: Path, *, enabled: bool) -> _Target:
    from kvferry.registry.discovery import normalise
    from kvferry.registry.plugin_names import ALL, PluginNames
    from kvferry.registry.selection import find_records

    records = tuple(_records().values())
    names = PluginNames.of_records(records)
    if enabled and name in _stored_names(path) and not names.meaning(name).plugins:
        return _Target(name, (), lambda stored: stored == name)  # uninstalled since
    plugins = tuple(record.name for record in find_records(records, name))

    def is_meant(stored: str) -> bool:
        found = names.meaning(stored).plugins
        return bool(found) and {*found} <= {*plugins}

    distribution = names.meaning(name).distribution
    if distribution is None:
        return _Target(plugins[0], plugins, is_meant)
    is_ambiguous = normalise(distribution) in {normalise(record.name) for record in records}
    return _Target(f"{distribution}:{ALL}" if is_ambiguous else distribution, plugins, is_meant)


def _write(path: Path, target: _Target, *, enabled: bool) -> None:
    from kvferry.registry.toggle_edits import set_toggle

    # A plugin that nothing disables is on by itself: naming it would make its uninstallation an error.
    set_toggle(path, target.name, enabled=None if enabled else False, is_meant=target.is_meant)
    if enabled and _not(enabled, target):
        set_toggle(path, target.name, enabled=True, is_meant=target.is_meant)


def _overruled(target: _Target, path: Path, enabled: bool) -> tuple[str, ...]:
    return tuple(
        f"plugin {record.name!r} is {record.state} all the same: "
        + (f"{record.decided_by} decides, which outranks {path}" if record.decided_by else str(record.reason))
        for record in _not(enabled, target)
    )


def _not(enabled: bool, target: _Target) -> "list[PluginRecord]":
    """Those that are not as wanted."""
    from kvferry.registry.records import State

    records = _records()
    return [records[name] for name in target.plugins if (records[name].state is State.DISCOVERED) is not enabled]


def _records() -> "dict[str, PluginRecord]":
    from kvferry.registry.discovery import discover
    from kvferry.registry.survey import survey

    return {record.name: record for record in survey(discover(), make_toggles(None)).records}


def _stored_names(path: Path) -> tuple[str, ...]:
    from kvferry.registry.toggle_files import parse_layer, read_toml

    return parse_layer(read_toml(path).get("plugins", {}), str(path)).disable if path.is_file() else ()


def _toggle_file(where: str | None) -> Path:
    from kvferry.registry.toggle_files import FILE_NAME, project_file, user_file

    project = project_file(working_folder(), os.environ)
    if where == "project":
        return project or working_folder() / FILE_NAME
    return project if project and where is None else user_file(os.environ)


def _contents(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
