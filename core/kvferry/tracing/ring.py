"""The last spans of a worker, kept in a ring of bounded size until somebody wants them in a file."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvferry.tracing.perfetto import Event, complete, microseconds, named
from kvferry_plugins.types import TransferEvent

CAPACITY = 100_000
"""Entries; about 25 MB when full."""

ENGINE = "engine"
"""The track of steps, which one thread makes one after the other."""


class Entry(NamedTuple):
    """A span, or with no end a moment; seconds of ``time.monotonic``."""

    number: int
    track: str
    """``ENGINE``, or what may overlap: ``request``, ``transfer``, ``handshake``."""
    key: int
    """The request."""
    name: str
    start: float
    end: float | None
    arguments: dict[str, Any] | None


class TraceRing:
    """Keeps the newest entries. Any thread may add, and any may ask for the events."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self._numbers = itertools.count()

    def add(
        self,
        track: str,
        key: int,
        name: str,
        start: float,
        end: float | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        """Keep one entry; the oldest makes room."""
        self._entries.append(Entry(next(self._numbers), track, key, name, start, end, arguments))

    def transfer(self, event: TransferEvent) -> None:
        """Keep one hand-off: from its begin to POSTING, from POSTING to its end, and its chunks as they came."""
        key = event.request_id
        figures = {"role": event.role.value, "outcome": event.outcome, "bytes": event.nbytes, "blocks": event.blocks}
        if event.error is not None:
            figures["error"] = type(event.error).__name__
        self.add("transfer", key, "transfer", event.started, event.ended, figures)
        self.add("transfer", key, "control", event.started, event.posted)
        self.add("transfer", key, "wire", event.posted, event.ended, {"bytes": event.nbytes})
        before = event.posted
        for when, nbytes in event.arrivals:
            self.add("transfer", key, "chunk", before, when, {"bytes_so_far": nbytes})
            before = when

    @property
    def dropped(self) -> int:
        """Entries that had to make room."""
        try:
            return self._entries[0].number
        except IndexError:
            return 0

    def entries(self) -> list[Entry]:
        """A snapshot, oldest first."""
        return list(self._entries.copy())


def events_of(entries: Iterable[Entry], *, process: int, process_name: str) -> Iterator[Event]:
    """Trace events of one process: the engine's steps as a thread, all else as tracks of one request each."""
    yield named("process_name", process_name, process)
    yield named("thread_name", ENGINE, process, 1)
    overlapping: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        if entry.track == ENGINE and entry.end is not None:
            arguments = {"request": entry.key, **(entry.arguments or {})}
            yield complete(entry.name, entry.start, entry.end, process, 1, arguments)
        else:
            overlapping.setdefault((entry.track, entry.key), []).append(entry)
    for (track, key), group in overlapping.items():
        for lane, spans in enumerate(_lanes(group)):
            local = f"{key:x}" if lane == 0 else f"{key:x}.{lane}"
            yield from _nested(spans, track, local, process)


def _lanes(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Share entries out so that those of a lane lie side by side or within each other."""
    lanes: list[list[Entry]] = []
    open_ends: list[list[float]] = []
    for entry in sorted(entries, key=lambda each: (each.start, -_end(each), each.number)):
        number = next((n for n, ends in enumerate(open_ends) if _has_room(ends, entry)), len(lanes))
        if number == len(lanes):
            lanes.append([])
            open_ends.append([])
        lanes[number].append(entry)
        open_ends[number].append(_end(entry))
    return lanes


def _has_room(ends: list[float], entry: Entry) -> bool:
    """Whether an entry that begins now lies behind what is open in a lane, or within it."""
    while ends and ends[-1] <= entry.start:
        ends.pop()
    return not ends or _end(entry) <= ends[-1]


def _end(entry: Entry) -> float:
    return entry.start if entry.end is None else entry.end


def _nested(spans: Iterable[Entry], track: str, local: str, process: int) -> Iterator[Event]:
    """Begin and end of each span, in the order in which they happened."""
    under_way: list[Entry] = []
    for span in spans:
        while under_way and _end(under_way[-1]) <= span.start:
            yield _event("e", under_way.pop(), track, local, process)
        if span.end is None:
            yield _event("n", span, track, local, process)
        else:
            yield _event("b", span, track, local, process)
            under_way.append(span)
    while under_way:
        yield _event("e", under_way.pop(), track, local, process)


def _event(phase: str, entry: Entry, track: str, local: str, process: int) -> Event:
    return {
        "name": entry.name,
        "cat": track,
        "ph": phase,
        "id2": {"local": local},
        "ts": microseconds(_end(entry) if phase == "e" else entry.start),
        "pid": process,
        "tid": 0,
        "args": {"request": entry.key, **(entry.arguments or {})} if phase != "e" else {},
    }
