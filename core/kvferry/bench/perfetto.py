"""What a bench traces, as a trace file: a process a way, a track a worker."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.spans import Span
from kvferry.tracing.perfetto import Event, complete, named, write_events


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request's spans, under a name that is shown."""

    name: str
    spans: Sequence[Span]


def write_trace(requests: Sequence[TracedRequest], path: Path) -> None:
    """Write all requests into one file: a process a way, a track a worker.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_events(_events(requests), path)


def _events(requests: Sequence[TracedRequest]) -> Iterator[Event]:
    begin = min((span.start for request in requests for span in request.spans), default=0.0)
    processes: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    for request in requests:
        for track in dict.fromkeys(span.track for span in request.spans):
            if request.name not in processes:
                processes[request.name] = len(processes) + 1
                yield named("process_name", request.name, processes[request.name])
            if (request.name, track) not in threads:
                threads[request.name, track] = len(threads) + 1
                yield named("thread_name", track, processes[request.name], threads[request.name, track])
        for span in _outer_first(request.spans):
            where = processes[request.name], threads[request.name, span.track]
            yield complete(span.name, span.start - begin, span.end - begin, *where, span.arguments)


def _outer_first(spans: Iterable[Span]) -> list[Span]:
    """Of spans that begin together the longer one first: it is drawn around the other."""
    return sorted(spans, key=lambda span: (span.start, -span.seconds))
