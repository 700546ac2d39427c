"""How this transceiver's handshakes went, counted by result and by the fields that differed."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvferry.transceiver.fingerprint import SEVERITY, Severity

RECENT = 64
"""Handshakes that are told one by one."""

OTHER = "other"
"""A field that only the peer knows: its names are not ours to count."""

FIELDS = frozenset((*SEVERITY, "protocol", "ranks", "descriptor", "hello", "message"))


class Result(StrEnum):
    """How a handshake ended."""

    READY = "ready"
    REFUSED_HERE = "refused here"
    REFUSED_THERE = "refused there"
    UNANSWERED = "unanswered"
    BROKEN = "broken"
    """The connection ended before it."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """One handshake that has ended; seconds of ``time.monotonic``."""

    peer: str
    started: float
    ended: float
    result: Result
    fields: tuple[str, ...] = ()
    """Of a refusal."""


class Handshakes:
    """All of one transceiver. The loop's thread counts, any thread asks."""

    def __init__(self) -> None:
        self._results: Counter[str] = Counter()
        self._differences: Counter[tuple[str, str]] = Counter()
        self._recent: deque[Handshake] = deque(maxlen=RECENT)

    def ended(self, peer: str, started: float, now: float, result: Result, fields: Iterable[str] = ()) -> None:
        """Count one; ``fields`` are those that a refusal names."""
        known = tuple(sorted({name if name in FIELDS else OTHER for name in fields}))
        self._results[result.value] += 1
        self._recent.append(Handshake(peer, started, now, result, known))
        self.differs(Severity.FATAL, known)

    def differs(self, severity: Severity, fields: Iterable[str]) -> None:
        """Count fields that differ."""
        for name in fields:
            self._differences[severity.value, name] += 1

    def dump(self) -> dict[str, object]:
        """Plain values for ``status_dump``."""
        differences: dict[str, dict[str, int]] = {}
        for (severity, name), count in dict(self._differences).items():
            differences.setdefault(severity, {})[name] = count
        return {
            "results": dict(self._results),
            "differences": differences,
            "recent": [
                {
                    "peer": each.peer,
                    "started": each.started,
                    "ended": each.ended,
                    "result": each.result.value,
                    "fields": list(each.fields),
                }
                for each in self._recent.copy()
            ],
        }
