"""``kvferry plugins lock`` and ``verify``: the plugins that should be, and whether they are."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli.options import plugin_options
from kvferry.cli.output import (
    CHECK_FAILED,
    envelope,
    error_items,
    json_option,
    print_json,
    print_warnings,
    report_errors,
)
from kvferry.folders import working_folder
from kvferry_plugins.errors import PluginLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.registry.inspection import Inspected
    from kvferry.registry.lock_differences import LockDifference
    from kvferry.registry.lock_file import Lock
    from kvferry.registry.locking import Surveyed
    from kvferry.registry.toggles import Toggles


@click.command("lock")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write there instead.")
@json_option
@report_errors(fields={"file": None, "changed": False, "digest": None, "plugins": []})
@plugin_options
def lock_plugins(output: Path | None, config: Path | None, toggles: "Toggles", as_json: bool) -> None:
    """Write kvferry.lock: the plugins that are on, their distributions, versions and files.

    It is written beside the project's kvferry.toml, else here. No plugin is imported.
    """
    from kvferry.registry.load import raise_all
    from kvferry.registry.lock_file import lock_path, write_lock
    from kvferry.registry.locking import survey_files

    surveyed = survey_files(toggles)
    raise_all(surveyed.selection.errors)
    lock = surveyed.lock()
    path = output or lock_path(working_folder(), os.environ)
    changed = write_lock(path, lock)
    warnings = [*_warnings(surveyed), *_unlockable(surveyed)]
    if as_json:
        plugins = [asdict(plugin) for plugin in lock.plugins]
        print_json(
            envelope(ok=True, file=str(path), changed=changed, digest=lock.digest, plugins=plugins, warnings=warnings)
        )
        return
    click.echo(f"{'wrote' if changed else 'unchanged:'} {path}: {_counted(lock)}, {lock.digest[:19]}…")
    print_warnings(warnings)


@click.command("verify")
@click.option("--lock", "file", type=click.Path(path_type=Path), metavar="FILE", help="The lock, if not kvferry.lock.")
@click.option("--no-import", is_flag=True, help="Compare with the lock only; import nothing.")
@click.option(
    "--timeout", type=click.FloatRange(0.1), default=60.0, show_default=True, help="Seconds that one import may take."
)
@json_option
@report_errors(fields={"lock": None, "digest": None, "differences": [], "imports": []})
@plugin_options
def verify_plugins(
    file: Path | None, no_import: bool, timeout: float, config: Path | None, toggles: "Toggles", as_json: bool
) -> None:
    """Compare the plugins with kvferry.lock, and import each in a process of its own.

    Exit status 1: a plugin differs, or cannot be imported. Without a lock only the imports are tried.
    """
    from kvferry.registry.load import raise_all
    from kvferry.registry.lock_file import lock_path, read_lock
    from kvferry.registry.locking import survey_files

    path = file or lock_path(working_folder(), os.environ)
    lock = read_lock(path) if file is not None or path.exists() else None
    surveyed = survey_files(toggles)
    raise_all(surveyed.selection.errors)
    differences = surveyed.differences(lock) if lock else []
    imports = [] if no_import else _import_all(surveyed, timeout)
    warnings = [*_warnings(surveyed), *_conduct(imports)]
    if lock is None:
        warnings.append(f"there is no {path}: nothing to compare with; `kvferry plugins lock` writes one")
    failures = [_failure(one) for one in imports if _is_broken(one)]
    if as_json:
        _print_json(path if lock else None, lock, differences, imports, warnings)
    else:
        _print_text(path, lock, differences, imports, failures)
        print_warnings(warnings)
    if differences or failures:
        raise SystemExit(CHECK_FAILED)


def _import_all(surveyed: "Surveyed", timeout: float) -> "list[Inspected]":
    from kvferry.registry.inspection import Inspected, inspect_plugins
    from kvferry.registry.records import State

    records = surveyed.selection.records
    contested = [Inspected(record) for record in records if record.state is State.FAILED]
    return [
        *contested,
        *inspect_plugins([record for record in records if record.state is State.DISCOVERED], timeout=timeout),
    ]


def _is_broken(one: "Inspected") -> bool:
    return not one.record.is_active or bool(one.problems)


def _failure(one: "Inspected") -> str:
    record = one.record
    if record.is_active:
        return "; ".join(one.problems)
    causes = " ← ".join(record.causes[1:])
    return record.describe() + (f" ← {causes}" if causes else "")


def _print_json(
    path: Path | None,
    lock: "Lock | None",
    differences: "Sequence[LockDifference]",
    imports: "Sequence[Inspected]",
    warnings: "Sequence[str]",
) -> None:
    told = [
        *((each.plugin, str(each)) for each in differences),
        *((one.record.name, _failure(one)) for one in imports if _is_broken(one)),
    ]
    errors = [item for plugin, text in told for item in error_items(PluginLoadError(text, plugin=plugin))]
    print_json(
        envelope(
            ok=not told,
            lock=None if path is None else str(path),
            digest=lock.digest if lock else None,
            differences=[{**asdict(each), "kind": str(each.kind)} for each in differences],
            imports=[_plain(one) for one in imports],
            warnings=warnings,
            errors=errors,
        )
    )


def _plain(one: "Inspected") -> dict[str, object]:
    record = one.record
    return {
        "name": record.name,
        "distribution": record.printed_distribution,
        "state": str(record.state),
        "reason": record.reason,
        "stage": record.stage,
        "causes": list(record.causes),
        "problems": list(one.problems),
        "conduct": list(record.conduct),
        "crashed": one.crashed,
        "import_seconds": record.import_seconds,
    }


def _print_text(
    path: Path,
    lock: "Lock | None",
    differences: "Sequence[LockDifference]",
    imports: "Sequence[Inspected]",
    failures: "Sequence[str]",
) -> None:
    from kvferry.registry.lock_differences import differences_by_line

    for line in differences_by_line(differences):
        click.echo(f"differs: {line}")
    for line in failures:
        click.echo(f"broken: {line}")
    if lock is not None:
        number = len(differences)
        verdict = f"{number} differ{'s' if number == 1 else ''}" if differences else "all as locked"
        click.echo(f"{path}: {_counted(lock)}; {verdict}")
    if imports:
        click.echo(f"imported: {len(imports) - len(failures)} of {len(imports)} plugins")


def _warnings(surveyed: "Surveyed") -> list[str]:
    return [*surveyed.discovery.warnings, *surveyed.selection.warnings]


def _conduct(imports: "Sequence[Inspected]") -> list[str]:
    """What an import did to its process beside being one."""
    records = [one.record for one in imports if one.record.conduct]
    return [
        f"plugin {record.name!r} ({record.printed_distribution}): its import {'; it '.join(record.conduct)}"
        for record in records
    ]


def _unlockable(surveyed: "Surveyed") -> list[str]:
    """What the lock leaves out, or cannot hold anybody to."""
    from kvferry.registry.records import State

    told = [
        f"plugin {record.describe()}; the lock leaves it out"
        for record in surveyed.selection.records
        if record.state is State.FAILED
    ]
    for record in surveyed.selection.records:
        files = surveyed.reader.files_of(record) if record.state is State.DISCOVERED else None
        if files is not None and (files.altered or files.missing):
            listed = ", ".join((*files.altered, *files.missing)[:3])
            what = f"changed since it was installed, or not there: {listed}"
            told.append(f"plugin {record.name!r} ({record.printed_distribution}) is locked with files {what}")
    return told


def _counted(lock: "Lock") -> str:
    plugins, distributions = len(lock.plugins), len({plugin.distribution for plugin in lock.plugins})
    return (
        f"{plugins} plugin{'' if plugins == 1 else 's'} of {distributions} distribution"
        f"{'' if distributions == 1 else 's'}"
    )
