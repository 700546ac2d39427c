"""A trace file that ui.perfetto.dev opens: Chrome's JSON trace format, complete events."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.spans import Span
from kvferry_plugins.errors import ConfigError

FORMAT = "https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format)"


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request's spans, under a name that is shown."""

    name: str
    spans: Sequence[Span]


def require_trace(path: Path) -> None:
    """Refuse, before anything is measured, a file that could not be written. Raises ConfigError."""
    try:
        path.open("a").close()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_trace(requests: Sequence[TracedRequest], path: Path) -> None:
    """Write all requests into one file: a process a way, a track a worker.

    Raises:
        ConfigError: the file cannot be written.
    """
    trace = {"traceEvents": list(_events(requests)), "displayTimeUnit": "ms", "otherData": {"format": FORMAT}}
    try:
        path.write_text(json.dumps(trace))
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write the trace to {path}: {error.strerror or error}", setting="--trace")


def _events(requests: Sequence[TracedRequest]) -> Iterator[dict[str, Any]]:
    begin = min((span.start for request in requests for span in request.spans), default=0.0)
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    for request in requests:
        for track in dict.fromkeys(span.track for span in request.spans):
            if request.name not in processes:
                processes[request.name] = len(processes) + 1
                yield _named("process_name", request.name, processes[request.name], 0)
            if (request.name, track) not in threads:
                threads[request.name, track] = len(threads) + 1
                yield _named("thread_name", track, processes[request.name], threads[request.name, track])
        for span in _outer_first(request.spans):
            yield {
                "name": span.name,
                "cat": "kvferry",
                "ph": "X",
                "ts": round((span.start - begin) * 1e6, 3),
                "dur": round(span.seconds * 1e6, 3),
                "pid": processes[request.name],
                "tid": threads[request.name, span.track],
                "args": dict(span.arguments or {}),
            }


def _outer_first(spans: Iterable[Span]) -> list[Span]:
    """Of spans that begin together the longer one first: it is drawn around the other."""
    return sorted(spans, key=lambda span: (span.start, -span.seconds))


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
