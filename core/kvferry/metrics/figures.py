"""Ended transfers, counted as they end: all that a scrape cannot read off the worker later."""

import bisect
import threading
from collections import Counter
from dataclasses import dataclass, field

from kvferry.transceiver.receives import ReceiveState
from kvferry.transceiver.sends import SendState
from kvferry_plugins import errors
from kvferry_plugins.types import TransferEvent

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histograms, in seconds."""

OTHER = "other"

CAUSES = frozenset(
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.KvferryError)
)
"""Error classes that are counted by name: a plugin's own could be any number."""

STATES = frozenset(state.value for states in (SendState, ReceiveState) for state in states)


@dataclass(slots=True)
class Histogram:
    """Seconds, counted by bucket."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def copy(self) -> "Histogram":
        """A snapshot."""
        return Histogram(list(self.counts), self.total)


@dataclass(slots=True)
class Ends:
    """Ended transfers of one role and outcome."""

    count: int = 0
    nbytes: int = 0
    blocks: int = 0
    empty: int = 0
    """That moved no byte."""
    admission: Histogram = field(default_factory=Histogram)
    transfer: Histogram = field(default_factory=Histogram)

    def add(self, event: TransferEvent) -> None:
        """Count one."""
        self.count += 1
        self.nbytes += event.nbytes
        self.blocks += event.blocks
        self.empty += not event.nbytes
        self.admission.observe(event.admission_seconds)
        self.transfer.observe(event.transfer_seconds)

    def copy(self) -> "Ends":
        """A snapshot."""
        return Ends(self.count, self.nbytes, self.blocks, self.empty, self.admission.copy(), self.transfer.copy())


class TransferFigures:
    """Every ended transfer of a worker; give ``count`` to ``build`` as ``on_event``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[tuple[str, str], Ends] = {}
        self._failures: Counter[tuple[str, str, str]] = Counter()

    def count(self, event: TransferEvent) -> None:
        """Count the end of a transfer; from any thread, in a few microseconds."""
        role = event.role.value
        with self._lock:
            ends = self._ends.get((role, event.outcome))
            if ends is None:
                ends = self._ends[role, event.outcome] = Ends()
            ends.add(event)
            if event.outcome == "failed":
                self._failures[role, _cause(event.error), _state(event.error)] += 1

    def ends(self) -> dict[tuple[str, str], Ends]:
        """A snapshot by role and outcome."""
        with self._lock:
            return {key: ends.copy() for key, ends in self._ends.items()}

    def failures(self) -> dict[tuple[str, str, str], int]:
        """Failed ones by role, class of the error, and the state in which a clock ran out."""
        with self._lock:
            return dict(self._failures)


def _cause(error: Exception | None) -> str:
    """The class of an error, or its nearest base that is the contract's."""
    names = (base.__name__ for base in type(error).__mro__)
    return next((name for name in names if name in CAUSES), OTHER)


def _state(error: Exception | None) -> str:
    if not isinstance(error, errors.TransferTimeoutError):
        return ""
    return error.state if error.state in STATES else OTHER
