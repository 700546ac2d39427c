"""Trace files that ui.perfetto.dev opens: Chrome's JSON trace format."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvferry_plugins.errors import ConfigError

FORMAT = "https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)"

Event = dict[str, Any]


def named(kind: str, name: str, process: int, thread: int = 0) -> Event:
    """Name a process (``process_name``) or a thread (``thread_name``)."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def complete(
    name: str, start: float, end: float, process: int, thread: int, arguments: Mapping[str, Any] | None = None
) -> Event:
    """A span of a thread, in seconds; those of one thread lie side by side or within each other."""
    return {
        "name": name,
        "cat": "kvferry",
        "ph": "X",
        "ts": microseconds(start),
        "dur": round(microseconds(end) - microseconds(start), 3),  # so that it ends where the next one begins
        "pid": process,
        "tid": thread,
        "args": dict(arguments or {}),
    }


def microseconds(seconds: float) -> float:
    """The format's unit, to a nanosecond."""
    return round(seconds * 1e6, 3)


def require_trace(path: Path) -> None:
    """Refuse, before anything is measured, a file that could not be written. Raises ConfigError."""
    try:
        path.open("a").close()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_events(events: Iterable[Event], path: Path, **other: object) -> None:
    """Write a trace file; whoever reads it meanwhile sees the former one.

    Args:
        events: of the format.
        path: the file.
        other: figures about the trace as a whole, into ``otherData``.

    Raises:
        ConfigError: the file cannot be written.
    """
    trace = {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": {"format": FORMAT, **other}}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
            path.write_text(json.dumps(trace))
            return
        draft.write_text(json.dumps(trace))
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def merge(sources: Iterable[Path], path: Path) -> int:
    """Write the events of several processes of one host, which share a clock, into one file.

    Returns:
        Events that are in it.

    Raises:
        ConfigError: the file cannot be written. A source that is missing or empty has no event.
    """
    traces = [_read(source) for source in sources]
    events = [event for trace in traces for event in trace.get("traceEvents", [])]
    dropped = sum(trace.get("otherData", {}).get("dropped", 0) for trace in traces)
    write_events(events, path, dropped=dropped)
    return len(events)


def _read(source: Path) -> dict[str, Any]:
    try:
        found = json.loads(source.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write the trace to {path}: {error.strerror or error}", setting="--trace")
