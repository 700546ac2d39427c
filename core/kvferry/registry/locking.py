"""Holds a process to a lock: the plugins that it would load, and then those that it did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.registry.discovery import Discovery, discover
from kvferry.registry.door import Registry
from kvferry.registry.lock_differences import LockDifference, compare_with_lock, differences_by_line
from kvferry.registry.lock_file import Lock, lock_path, make_lock, read_lock
from kvferry.registry.plugin_set import FilesReader, known_plugins
from kvferry.registry.selection import Selection
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Toggles
from kvferry_plugins.errors import ConfigError, PluginLoadError

VARIABLE = "KVFERRY_LOCKED"


@dataclass(frozen=True, slots=True)
class Surveyed:
    """The plugins as metadata, files and toggles tell them; none is imported."""

    discovery: Discovery
    selection: Selection
    reader: FilesReader

    def lock(self) -> Lock:
        """What a lock would say now."""
        return make_lock(known_plugins(self.selection.records, self.reader))

    def differences(self, lock: Lock) -> list[LockDifference]:
        """In what the plugins that are on differ from a lock."""
        return compare_with_lock(lock, self.selection.records, self.reader)


def survey_files(toggles: Toggles, paths: Sequence[str] | None = None) -> Surveyed:
    """Find the plugins that are on, and what they consist of."""
    discovery = discover(paths)
    return Surveyed(discovery, survey(discovery, toggles), FilesReader(discovery))


def wanted_lock(flag: str | None, environ: Mapping[str, str], folder: Path) -> Path | None:
    """Tell which lock holds for a worker; None = none does.

    Args:
        flag: of ``--locked``: a file, empty for the usual one, None where the flag is not there.
        environ: may hold ``KVFERRY_LOCKED``, where the flag is not there.
        folder: where the search for the project starts.

    Raises:
        ConfigError: the variable is neither 1 nor 0.
    """
    if flag:
        return Path(flag)
    value = environ.get(VARIABLE, "").strip()
    if flag is None and value not in ("", "0", "1"):
        raise ConfigError(f"{VARIABLE} is {value!r}; write 1, or unset it and give --locked {value}", setting=VARIABLE)
    return lock_path(folder, environ) if flag == "" or value == "1" else None


def require_locked(path: Path, toggles: Toggles) -> Lock:
    """Check, before any plugin is imported, that a process would have the plugins of a lock.

    Raises:
        ConfigError: the lock cannot be read.
        PluginLoadError: a plugin differs; the message names each.
    """
    lock = read_lock(path)
    differences = survey_files(toggles).differences(lock)
    if differences:
        raise _refusal(path, len(differences), differences_by_line(differences), differences[0].plugin)
    return lock


def require_loaded(path: Path, lock: Lock, registry: Registry) -> None:
    """Check that every plugin of a lock was loaded. Raises PluginLoadError."""
    records = (registry.record(plugin.name) for plugin in lock.plugins)
    failed = [record for record in records if record is not None and not record.is_active]
    if failed:
        fix = "mend or reinstall it, or lock again without it"
        told = [f"{record.describe()}; {fix}" for record in failed]
        raise _refusal(path, len(failed), told, failed[0].name)


def _refusal(path: Path, number: int, told: Sequence[str], first: str) -> PluginLoadError:
    counted = "1 plugin differs" if number == 1 else f"{number} plugins differ"
    return PluginLoadError(f"this worker is locked, and {counted} from {path}: {' · '.join(told)}", plugin=first)
