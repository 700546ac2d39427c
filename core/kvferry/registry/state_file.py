"""Remembers how every plugin was when it was last loaded; best effort, and never in the way."""

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvferry.folders import xdg_folder
from kvferry.registry.records import Origin, PluginRecord, State
from kvferry.whole_files import replace_file

_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LastFailure:
    """How a plugin failed when it last did, though it may have loaded since."""

    date: str
    """ISO 8601, UTC."""
    distribution: str
    """As printed, with its version then."""
    reason: str | None = None
    stage: str | None = None
    causes: tuple[str, ...] = ()
    """The whole chain, outermost first."""


@dataclass(frozen=True, slots=True)
class LastState:
    """What a command that loaded the plugin saw."""

    state: str
    date: str
    """ISO 8601, UTC."""
    distribution: str
    """As printed, with its version then."""
    reason: str | None = None
    import_seconds: float | None = None
    failure: LastFailure | None = None


def state_file(environ: Mapping[str, str]) -> Path:
    """Where states are kept: ``$XDG_STATE_HOME/kvferry/plugins.json``."""
    return xdg_folder(environ, "XDG_STATE_HOME", ".local/state") / "plugins.json"


def last_states(path: Path, environment: str = sys.prefix) -> dict[str, LastState]:
    """Read what was recorded in this Python environment; empty where nothing can be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {name: _last_state(state) for name, state in _read(path).get(environment, {}).items()}
    return {}


def record_states(path: Path, records: Iterable[PluginRecord], environment: str = sys.prefix) -> None:
    """Add the states of the plugins that were loaded; a file that cannot be written is no matter."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    states = {
        record.name: _plain(record, date)
        for record in records
        if record.origin is not Origin.INJECTED and record.state not in (State.DISCOVERED, State.DISABLED)
    }
    with suppress(OSError, ValueError, TypeError, AttributeError):
        _write(path, environment, states)


def _plain(record: PluginRecord, date: str) -> dict[str, Any]:
    state = {
        "state": str(record.state),
        "date": date,
        "distribution": record.printed_distribution,
        "reason": record.reason,
        "import_seconds": record.import_seconds,
    }
    if record.state is not State.FAILED:
        return state
    failure = {key: state[key] for key in ("date", "distribution", "reason")}
    return {**state, "failure": {**failure, "stage": record.stage, "causes": list(record.causes)}}


def _last_state(plain: Mapping[str, Any]) -> LastState:
    """What a newer kvferry has added is left out."""
    failure = plain.get("failure")
    known = {field.name: plain[field.name] for field in fields(LastState) if field.name in plain}
    return LastState(**{**known, "failure": _last_failure(failure) if failure else None})


def _last_failure(plain: Mapping[str, Any]) -> LastFailure:
    known = {field.name: plain[field.name] for field in fields(LastFailure) if field.name in plain}
    return LastFailure(**{**known, "causes": tuple(plain.get("causes", ()))})


def _read(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    environments: dict[str, Any] = document["environments"] if document.get("schema") == _SCHEMA else {}
    return environments


def _write(path: Path, environment: str, states: Mapping[str, Any]) -> None:
    environments: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, AttributeError):
        environments = _read(path)
    before = environments.get(environment, {})
    kept = {name: {"failure": before[name]["failure"]} for name in states if before.get(name, {}).get("failure")}
    environments[environment] = {**before, **{name: {**kept.get(name, {}), **state} for name, state in states.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": _SCHEMA, "environments": environments}, indent=1, sort_keys=True)
    replace_file(path, text.encode())
