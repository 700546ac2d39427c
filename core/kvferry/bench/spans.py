"""What happened when in one request: spans on the clock that all processes of a host share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PARTS = ("queue", "prefill", "control", "wire", "attach")
"""What a request waits for until its first decode step may run, in the order in which a plain hand-off has them.

``queue``: from HTTP to the engine's first step, at both workers. ``prefill``: the prompt's forward passes. ``control``:
handshake, TABLE, and whatever else lies between the fetch's begin and POSTING. ``wire``: from POSTING to DONE.
``attach``: from DONE until the generation engine holds the request.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that took its time; seconds of ``time.monotonic``."""

    name: str
    start: float
    end: float
    track: str
    """Who did it: ``client``, ``context``, ``generation``."""
    arguments: Mapping[str, Any] | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def read_spans(timeline: Iterable[Mapping[str, Any]], track: str) -> list[Span]:
    """Read ``kvferry.timeline`` of a worker's answer."""
    known = ("name", "start", "end")
    return [
        Span(entry["name"], entry["start"], entry["end"], track, {k: v for k, v in entry.items() if k not in known})
        for entry in timeline
    ]


def seconds_by_part(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of each part, summed over its spans; they overlap where a transfer hides behind the prefill."""
    found = dict.fromkeys(PARTS, 0.0)
    for span in spans:
        if span.name in found:
            found[span.name] += span.seconds
    return found


def exposed_seconds(spans: Iterable[Span]) -> float | None:
    """From the end of prefill until the first decode step may run: what of a hand-off nobody could hide."""
    spans = list(spans)
    prefilled = max((span.end for span in spans if span.name == "prefill"), default=None)
    attached = max((span.end for span in spans if span.name == "attach"), default=None)
    return None if prefilled is None or attached is None else attached - prefilled
