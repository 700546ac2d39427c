"""The files that kvferry keeps for this user: whether a worker can use them, and what in them is old."""

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from kvferry.doctor.findings import Area, Finding, Severity
from kvferry.registry.state_file import LastState, last_states, state_file
from kvferry_plugins.errors import ConfigError

_NAMES_SHOWN = 5


def file_findings(environ: Mapping[str, str], installed: Collection[str]) -> list[Finding]:
    """Look at the key file and at the plugins' recorded states; writes nothing.

    Args:
        environ: the environment.
        installed: names of all plugins that were discovered.
    """
    from kvferry.transceiver.keys import key_path

    states = state_file(environ)
    return [*key_findings(key_path()), *state_findings(states, last_states(states), installed)]


def key_findings(path: Path) -> Iterator[Finding]:
    """Read the key pair as a worker would, without making one."""
    from kvferry.transceiver.keys import load_or_make_key

    if not _may_exist(path):
        folder = next(folder for folder in path.parents if _may_exist(folder))
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            what = f"is not there, and {folder} cannot be written: no worker starts"
            fix = "set XDG_STATE_HOME or KVFERRY_CURVE_KEY_FILE to a place you may write"
            yield _finding(Severity.ERROR, str(path), what, fix=fix)
        return
    try:
        load_or_make_key(path)
    except ConfigError as error:
        what, _, fix = str(error).partition(": ")
        yield _finding(Severity.ERROR, "the key file", f"is of no use: {what}", fix=fix)
        return
    if path.parent.stat().st_mode & 0o022:
        what = f"lies in {path.parent}, which others may write: they can put another key there"
        yield _finding(Severity.WARNING, "the key file", what, fix=f"chmod go-w {path.parent}")


def state_findings(path: Path, states: Mapping[str, LastState], installed: Collection[str]) -> Iterator[Finding]:
    """Look for recorded plugins that are gone, and for a file that cannot be read."""
    gone = sorted(set(states) - set(installed))
    if gone:
        more = f" and {len(gone) - _NAMES_SHOWN} more" if len(gone) > _NAMES_SHOWN else ""
        what = f"remembers plugins that are not installed any more: {', '.join(gone[:_NAMES_SHOWN])}{more}"
        yield _finding(Severity.INFO, str(path), what, fix="nothing; or delete the file, it is made again")
    elif path.exists() and not _is_readable(path):
        what = "cannot be read: plugins list shows no last state"
        yield _finding(Severity.WARNING, str(path), what, fix="delete it, it is made again")


def _may_exist(path: Path) -> bool:
    """Where one may not even look, what is there is for the reading to report."""
    try:
        return path.exists()
    except OSError:
        return True


def _is_readable(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8"))["environments"].get(sys.prefix, {}), dict)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _finding(severity: Severity, subject: str, what: str, *, fix: str) -> Finding:
    return Finding(Area.FILES, severity, subject, what, fix=fix)
