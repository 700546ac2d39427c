"""How the plugins that are on differ from those of a lock, each by name, with what to do. Pure but for the files."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry.registry.discovery import normalise
from kvferry.registry.lock_file import Lock
from kvferry.registry.plugin_files import PluginFiles
from kvferry.registry.plugin_set import FilesReader, KnownPlugin, known_plugins
from kvferry.registry.records import INJECTED, PluginRecord, State
from kvferry.registry.selection import qualified_name

_SHOWN = 3
"""Files that a message names."""


class Kind(StrEnum):
    """In what a plugin differs."""

    MISSING = "missing"
    ADDED = "added"
    DISTRIBUTION = "distribution"
    VERSION = "version"
    ENTRY_POINT = "entry point"
    FILES = "files"


@dataclass(frozen=True, slots=True)
class LockDifference:
    """One plugin that is not as the lock says."""

    plugin: str
    distribution: str
    """As printed: the lock's where the plugin is missing, else the one that is here."""
    kind: Kind
    locked: str | None
    """What the lock says; None = nothing of this plugin."""
    found: str | None
    """What is here; None = no such plugin is on."""
    what: str
    """For people, without the plugin's name."""
    fix: str

    @property
    def line(self) -> str:
        """The distribution, what differs and what to do: often the same of all plugins of a distribution."""
        return f"({self.distribution}): {self.what}; {self.fix}"

    def __str__(self) -> str:
        return f"{self.plugin} {self.line}"


def differences_by_line(differences: Iterable[LockDifference]) -> list[str]:
    """Say each difference once, with all plugins of which it is told."""
    plugins: dict[str, list[str]] = {}
    for each in differences:
        plugins.setdefault(each.line, []).append(each.plugin)
    return [f"{', '.join(names)} {line}" for line, names in plugins.items()]


def compare_with_lock(lock: Lock, records: Sequence[PluginRecord], reader: FilesReader) -> list[LockDifference]:
    """List every plugin that differs, sorted by name.

    Args:
        lock: what should be.
        records: all plugins, whatever their state, as the toggles left them.
        reader: of their files.
    """
    locked = {plugin.name: plugin for plugin in lock.plugins}
    here = {plugin.name: plugin for plugin in known_plugins(records, reader)}
    files = {record.name: reader.files_of(record) for record in records if record.name in here}
    found = [
        *(_missing(locked[name], records) for name in locked.keys() - here.keys()),
        *(_added(here[name]) for name in here.keys() - locked.keys()),
        *(each for name in locked.keys() & here.keys() for each in _changed(locked[name], here[name], files[name])),
    ]
    return sorted(found, key=lambda difference: difference.plugin)


def _missing(locked: KnownPlugin, records: Iterable[PluginRecord]) -> LockDifference:
    record = next((each for each in records if _is_the_same(locked, each)), None)
    if record is None:
        what, fix = "locked, and not installed here", _install(locked)
    elif record.state is State.DISABLED:
        what, fix = f"locked, and disabled here {record.reason}", "take it out of there, or lock again without it"
    else:
        what, fix = f"locked, and {record.state} here: {record.reason}", "mend that, or lock again without it"
    found = None if record is None else str(record.state)
    return LockDifference(
        locked.name, locked.printed_distribution, Kind.MISSING, locked.printed_distribution, found, what, fix
    )


def _is_the_same(locked: KnownPlugin, record: PluginRecord) -> bool:
    qualified = f"{normalise(locked.distribution)}:{locked.name.rpartition(':')[2]}"
    return record.name == locked.name or qualified_name(record) == qualified


def _added(here: KnownPlugin) -> LockDifference:
    fix = f"uninstall it, leave it out with -p no:{here.name}, or lock again with it"
    what = "on here, and not locked"
    return LockDifference(here.name, here.printed_distribution, Kind.ADDED, None, here.printed_distribution, what, fix)


def _changed(locked: KnownPlugin, here: KnownPlugin, files: PluginFiles | None) -> Iterator[LockDifference]:
    """The first thing in which it differs: what follows, follows from it."""

    def differs(kind: Kind, there: str, now: str, what: str, fix: str) -> LockDifference:
        return LockDifference(here.name, here.printed_distribution, kind, there, now, what, fix)

    if normalise(locked.distribution) != normalise(here.distribution):
        there, now = locked.printed_distribution, here.printed_distribution
        yield differs(Kind.DISTRIBUTION, there, now, f"brought by {now} here, locked as {there}'s", _install(locked))
    elif locked.version != here.version:
        there, now = locked.version or "none", here.version or "none"
        yield differs(Kind.VERSION, there, now, f"version {now} here, {there} locked", _install(locked))
    elif locked.entry_point != here.entry_point:
        there, now = locked.entry_point, here.entry_point
        yield differs(Kind.ENTRY_POINT, there, now, f"entry point {now} here, {there} locked", _again(locked))
    elif locked.digest != here.digest:
        what = f"other files than locked, of the same version: {_in_what(locked, here, files)}"
        yield differs(Kind.FILES, locked.digest, here.digest, what, _again(locked))


def _in_what(locked: KnownPlugin, here: KnownPlugin, files: PluginFiles | None) -> str:
    if files is None:
        return "none of them are here"
    told = []
    if files.missing:
        told.append(f"{_listed(files.missing)} cannot be read")
    if files.altered:
        told.append(f"{_listed(files.altered)} changed since the installation")
    if locked.editable != here.editable:
        told.append(f"{_kind(here)} is here, and {_kind(locked)} is locked")
    return "; ".join(told) or ("its sources were edited" if here.editable else "it is another build")


def _kind(plugin: KnownPlugin) -> str:
    return "an editable install" if plugin.editable else "an installed wheel"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _install(locked: KnownPlugin) -> str:
    if locked.distribution == INJECTED:
        return f"name it with -p {locked.name}, or lock again"
    return f"pip install '{_requirement(locked)}', or lock again"


def _again(locked: KnownPlugin) -> str:
    if locked.distribution == INJECTED or locked.editable:
        return "bring back the files that were locked, or lock again"
    return f"pip install --force-reinstall --no-deps '{_requirement(locked)}', or lock again"


def _requirement(locked: KnownPlugin) -> str:
    return f"{locked.distribution}=={locked.version}" if locked.version else locked.distribution
