"""Whether the plugins are those of the lock, where there is one."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from kvferry.doctor.findings import Area, Finding, Severity
from kvferry.registry.discovery import Discovery
from kvferry.registry.lock_differences import LockDifference, compare_with_lock
from kvferry.registry.lock_file import lock_path, read_lock
from kvferry.registry.plugin_set import FilesReader
from kvferry.registry.selection import Selection
from kvferry_plugins.errors import ConfigError


def lock_findings(
    discovery: Discovery, selection: Selection, environ: Mapping[str, str], folder: Path
) -> Iterator[Finding]:
    """Compare with the lock that a worker would be held to here.

    Args:
        discovery: where the distributions are.
        selection: what the toggles left.
        environ: the environment.
        folder: where the search for the project starts.
    """
    path = lock_path(folder, environ)
    if not path.exists():
        return
    try:
        lock = read_lock(path)
    except ConfigError as error:
        what, _, fix = str(error).rpartition("; ")
        yield Finding(Area.PLUGINS, Severity.WARNING, path.name, what, fix=fix)
        return
    differences = compare_with_lock(lock, selection.records, FilesReader(discovery))
    yield from (_finding(each, path) for each in differences)
    if not differences:
        yield Finding(Area.PLUGINS, Severity.OK, path.name, f"its {len(lock.plugins)} plugin(s) are as locked")


def _finding(difference: LockDifference, path: Path) -> Finding:
    return Finding(
        Area.PLUGINS,
        Severity.WARNING,
        difference.plugin,
        f"differs from {path.name}, so that no worker starts with --locked: {difference.what}",
        fix=difference.fix,
        plugin=difference.plugin,
        distribution=difference.distribution,
    )
