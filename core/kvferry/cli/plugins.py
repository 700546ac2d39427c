"""``kvferry plugins``: which plugins there are, in which state, and the switches for them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli.options import make_toggles, plugin_options
from kvferry.cli.output import (
    INPUT_WRONG,
    envelope,
    error_items,
    json_option,
    print_errors,
    print_json,
    print_warnings,
    report_errors,
)
from kvferry.cli.plugin_lock import lock_plugins, verify_plugins
from kvferry.cli.plugin_tables import plain_plugin, print_plugin, print_plugins
from kvferry_plugins.errors import PluginLoadError

if TYPE_CHECKING:
    from kvferry.registry.discovery import Discovery
    from kvferry.registry.records import PluginRecord
    from kvferry.registry.selection import Selection
    from kvferry.registry.state_file import LastState
    from kvferry.registry.toggles import Toggles


@click.group()
def plugins() -> None:
    """List, inspect, enable, disable, lock and verify plugins."""


plugins.add_command(lock_plugins)
plugins.add_command(verify_plugins)


@plugins.command("list")
@json_option
@report_errors(fields={"plugins": []})
@plugin_options
def list_plugins(config: Path | None, toggles: "Toggles", as_json: bool) -> None:
    """List all plugins by their metadata; none is imported."""
    discovery, selection = _survey(toggles)
    states = _last_states()
    warnings = [*discovery.warnings, *selection.warnings]
    if as_json:
        items = [plain_plugin(record, states.get(record.name)) for record in selection.records]
        errors = [item for error in selection.errors for item in error_items(error)]
        print_json(envelope(ok=not errors, plugins=items, warnings=warnings, errors=errors))
    else:
        print_plugins(selection.records, states)
        print_warnings(warnings)
        print_errors(selection.errors)
    if selection.errors:
        raise SystemExit(INPUT_WRONG)


@plugins.command("show")
@click.argument("name")
@json_option
@report_errors(fields={"plugin": None})
@plugin_options
def show_plugin(name: str, config: Path | None, toggles: "Toggles", as_json: bool) -> None:
    """Show one plugin, importing it in a process of its own (unless it is disabled)."""
    from kvferry.registry.inspection import inspect_plugin
    from kvferry.registry.records import State
    from kvferry.registry.state_file import record_states, state_file

    _, selection = _survey(toggles)
    record = _find(selection, name)
    last = _last_states().get(record.name)
    if record.state is State.DISCOVERED:
        record = inspect_plugin(record)
        record_states(state_file(os.environ), [record])
    failed = record.state is State.FAILED
    if as_json:
        errors = error_items(PluginLoadError(record.describe(), plugin=record.name)) if failed else []
        item = plain_plugin(record, last)
        print_json(envelope(ok=not failed, plugin=item, warnings=selection.warnings, errors=errors))
    else:
        print_plugin(record, last)
        print_warnings(selection.warnings)
    if failed:
        raise SystemExit(1)


def _switch_options(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option("--user", "where", flag_value="user", help="Write the user's kvferry.toml.")(function)
    function = click.option(
        "--project",
        "where",
        flag_value="project",
        help="Write the nearest kvferry.toml upwards, or make one here. The default where there is one.",
    )(function)
    return click.argument("name")(function)


@plugins.command("enable")
@_switch_options
@json_option
@report_errors(fields={"plugin": None, "file": None})
def enable_plugin(name: str, where: str | None, as_json: bool) -> None:
    """Turn a plugin on in a kvferry.toml; no plugin is imported."""
    _switch(name, where, as_json, enabled=True)


@plugins.command("disable")
@_switch_options
@json_option
@report_errors(fields={"plugin": None, "file": None})
def disable_plugin(name: str, where: str | None, as_json: bool) -> None:
    """Turn a plugin off in a kvferry.toml; no plugin is imported."""
    _switch(name, where, as_json, enabled=False)


def _switch(name: str, where: str | None, as_json: bool, *, enabled: bool) -> None:
    path = _toggle_file(where)
    before = _text(path)
    known, spellings = _spellings(name, path, enabled=enabled)
    _write_toggle(path, known, spellings, enabled=enabled)
    changed = _text(path) != before
    warnings = _overruled(known, path, enabled=enabled)
    if as_json:
        print_json(envelope(ok=True, plugin=spellings[0], file=str(path), changed=changed, warnings=warnings))
        return
    verb = "enabled" if enabled else "disabled"
    click.echo(
        f"{verb} {spellings[0]}: wrote {path}" if changed else f"{spellings[0]} is {verb} already, as {path} says"
    )
    print_warnings(warnings)


def _write_toggle(path: Path, known: str | None, spellings: Sequence[str], *, enabled: bool) -> None:
    from kvferry.registry.toggle_edits import set_toggle

    # A plugin that nothing disables is on by itself: naming it would make its uninstallation an error.
    set_toggle(path, spellings, enabled=None if enabled else False)
    if enabled and known is not None and not _is_on(known):
        set_toggle(path, spellings, enabled=True)


def _overruled(known: str | None, path: Path, *, enabled: bool) -> list[str]:
    if known is None or _is_on(known) is enabled:
        return []
    record = _find(_survey(make_toggles(None))[1], known)
    by = f"{record.decided_by} decides, which outranks {path}" if record.decided_by else record.reason
    return [f"plugin {record.name!r} is {record.state} all the same: {by}"]


def _is_on(name: str) -> bool:
    from kvferry.registry.records import State

    return _find(_survey(make_toggles(None))[1], name).state is State.DISCOVERED


def _spellings(name: str, path: Path, *, enabled: bool) -> tuple[str | None, list[str]]:
    """Name the plugin, if it is installed, and all its spellings, the one to write first."""
    from kvferry.registry.selection import qualified_name

    selection = _survey(make_toggles(None))[1]
    stored = _stored_names(path)
    if enabled and name in stored and all(record.name != name for record in selection.records):
        return None, [name]
    record = _find(selection, name)
    as_printed = f"{record.distribution}:{record.name.rpartition(':')[2]}"
    return record.name, list(dict.fromkeys([record.name, qualified_name(record), as_printed]))


def _stored_names(path: Path) -> tuple[str, ...]:
    from kvferry.registry.toggle_files import parse_layer, read_toml

    return parse_layer(read_toml(path).get("plugins", {}), str(path)).disable if path.is_file() else ()


def _toggle_file(where: str | None) -> Path:
    from kvferry.registry.toggle_files import FILE_NAME, project_file, user_file

    project = project_file(Path.cwd(), os.environ)
    if where == "project":
        return project or Path.cwd() / FILE_NAME
    return project if project and where is None else user_file(os.environ)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _survey(toggles: "Toggles") -> "tuple[Discovery, Selection]":
    from kvferry.registry.discovery import discover
    from kvferry.registry.survey import survey

    discovery = discover()
    return discovery, survey(discovery, toggles)


def _last_states() -> "dict[str, LastState]":
    from kvferry.registry.state_file import last_states, state_file

    return last_states(state_file(os.environ))


def _find(selection: "Selection", name: str) -> "PluginRecord":
    from kvferry.registry.selection import find_record

    return find_record(selection.records, name.strip())
