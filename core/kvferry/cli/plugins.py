"""``kvferry plugins``: which plugins there are, in which state, and the switches for them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli.options import plugin_options
from kvferry.cli.output import (
    CHECK_FAILED,
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
from kvferry.cli.plugin_tables import plain_inspected, print_plugin
from kvferry_plugins.errors import KvferryError, PluginLoadError

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
@click.option("--probe", is_flag=True, help="Import each plugin that is on, in a process of its own.")
@click.option("--worker", metavar="ADDRESS", help="Beside each, what a running worker has: http://HOST:PORT.")
@json_option
@report_errors(fields={"plugins": []})
@plugin_options
def list_plugins(config: Path | None, toggles: "Toggles", probe: bool, worker: str | None, as_json: bool) -> None:
    """List all plugins by their metadata; none is imported, unless --probe asks for it.

    Says which layer decided each state. Exit status: 1 if a plugin that --probe imports fails, 2 if a toggle names
    nothing.
    """
    from kvferry.cli.plugin_tables import plain_selection, print_selection
    from kvferry.cli.running_worker import reading
    from kvferry.registry.comparison import compare_records

    there = _ask_records(worker) if worker else None
    discovery, selection = _survey(toggles)
    records = _probed(selection) if probe else selection.records
    states = _last_states()
    with reading(*filter(None, [worker])):
        compared = compare_records(selection.records, there) if there is not None else None
    warnings = [*discovery.warnings, *selection.warnings]
    if as_json:
        errors = [item for error in selection.errors for item in error_items(error)]
        fields = plain_selection(selection, records, states, toggles, compared)
        print_json(envelope(ok=not errors, **fields, warnings=warnings, errors=errors))
    else:
        print_selection(selection, records, states, toggles, compared)
        print_warnings(warnings)
        print_errors(selection.errors)
    _end(selection, records if probe else ())


def _end(selection: "Selection", imported: "Sequence[PluginRecord]") -> None:
    if selection.errors:
        raise SystemExit(INPUT_WRONG)
    if any(record.state == "failed" for record in imported):
        raise SystemExit(CHECK_FAILED)


def _probed(selection: "Selection") -> "tuple[PluginRecord, ...]":
    """What is on, as it comes out of processes of its own; the rest as it is."""
    from kvferry.registry.inspection import inspect_plugins
    from kvferry.registry.records import State
    from kvferry.registry.state_file import record_states, state_file

    wanted = [record for record in selection.records if record.state is State.DISCOVERED]
    imported = {one.record.name: one.record for one in inspect_plugins(wanted)}
    record_states(state_file(os.environ), imported.values())
    return tuple(imported.get(record.name, record) for record in selection.records)


def _ask_records(address: str) -> "list[dict[str, Any]]":
    from kvferry.cli.running_worker import ask_status

    records: list[dict[str, Any]] | None = ask_status(address).get("plugin_records")
    if records is None:
        raise KvferryError(f"the worker at {address} says nothing of its plugins: it runs another kvferry; restart it")
    return records


@plugins.command("show")
@click.argument("name")
@json_option
@report_errors(fields={"plugin": None})
@plugin_options
def show_plugin(name: str, config: Path | None, toggles: "Toggles", as_json: bool) -> None:
    """Show one plugin, importing it in a process of its own (unless it is disabled)."""
    from kvferry.registry.inspection import Inspected, inspect_plugins
    from kvferry.registry.records import State
    from kvferry.registry.state_file import record_states, state_file

    _, selection = _survey(toggles)
    record = _find(selection, name)
    one = Inspected(record)
    last = _last_states().get(record.name)
    if record.state is State.DISCOVERED:
        (one,) = inspect_plugins([record])
        record_states(state_file(os.environ), [one.record])
    failed = one.record.state is State.FAILED
    if as_json:
        errors = error_items(PluginLoadError(one.record.describe(), plugin=record.name)) if failed else []
        item = plain_inspected(one, last, selection)
        print_json(envelope(ok=not failed, plugin=item, warnings=selection.warnings, errors=errors))
    else:
        print_plugin(one, last, selection)
        print_warnings(selection.warnings)
    if failed:
        raise SystemExit(CHECK_FAILED)


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
    from kvferry.cli.plugin_switch import switch

    done = switch(name, where, enabled=enabled)
    if as_json:
        about: dict[str, Any] = {"plugin": done.name, "plugins": done.plugins}
        print_json(envelope(ok=True, **about, file=str(done.file), changed=done.changed, warnings=done.warnings))
        return
    verb = "enabled" if enabled else "disabled"
    what = f"{done.name} ({', '.join(done.plugins)})" if done.plugins != (done.name,) else done.name
    click.echo(
        f"{verb} {what}: wrote {done.file}" if done.changed else f"{what} is {verb} already, as {done.file} says"
    )
    print_warnings(done.warnings)


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
