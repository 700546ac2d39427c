"""Who owns each in-flight block, since when, and which event frees it."""

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.layout import BlockIds


class Owner(StrEnum):
    """What an in-flight block is waiting for."""

    SOURCE = "source"
    """Read by our writes; freed when acknowledged or refused, or when the lease ended and nothing is posted."""
    DESTINATION = "destination"
    """Written by the peer; freed when every write is known finished."""
    QUARANTINE = "quarantine"
    """Its request is over, but the writer may still write; freed by CANCELLED, or when the writer is fenced."""


@dataclass(slots=True)
class Entry:
    """One request's blocks, held in the manager until ``Ledger.release``."""

    request_id: int
    owner: Owner
    tables: tuple[BlockIds, ...]
    freed_by: str
    since: float = field(default_factory=time.monotonic)
    number: int = 0

    @property
    def blocks(self) -> int:
        """Block ids that are really here (−1 is none)."""
        return int(sum(np.count_nonzero(table >= 0) for table in self.tables))


class Ledger:
    """The manager's blocks that a transfer has; drained = empty. May be called from any thread."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._entries: dict[int, Entry] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.reclaimed: dict[str, int] = {}
        """Blocks given back so far, by reason."""

    def hold(self, request_id: int, owner: Owner, tables: Sequence[BlockIds], *, freed_by: str) -> Entry:
        """Take a reference to each block. Raises ValueError (from the manager) if one is not in use."""
        self._manager.hold(tables)
        entry = Entry(request_id, owner, tuple(tables), freed_by, number=next(self._numbers))
        with self._lock:
            self._entries[entry.number] = entry
        return entry

    def leave_out(self, request_id: int, leading_tokens: Sequence[int]) -> None:
        """Tell the manager what a receive will lack; nothing if the request has no blocks any more."""
        with contextlib.suppress(KeyError):
            self._manager.leave_out(request_id, leading_tokens)

    def quarantine(self, entry: Entry, *, freed_by: str) -> None:
        """Keep the blocks from everybody until the writer is proven done or gone."""
        with self._lock:
            entry.owner, entry.freed_by, entry.since = Owner.QUARANTINE, freed_by, time.monotonic()

    def release(self, entry: Entry, *, reason: str) -> None:
        """Give the blocks back; an entry that was released already is left alone."""
        with self._lock:
            if self._entries.pop(entry.number, None) is None:
                return
            self.reclaimed[reason] = self.reclaimed.get(reason, 0) + entry.blocks
        self._manager.release(entry.tables)

    def entries(self) -> list[Entry]:
        """A snapshot, oldest first."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: entry.number)

    def holds(self, request_id: int) -> bool:
        """Whether any block of the request is in the ledger."""
        with self._lock:
            return any(entry.request_id == request_id for entry in self._entries.values())

    def awaits_writes(self, request_id: int, tables: Sequence[BlockIds]) -> bool:
        """Whether a peer may still write, for a former attempt of the request, to one of these blocks."""
        with self._lock:
            waiting = [e for e in self._entries.values() if e.request_id == request_id and e.owner is not Owner.SOURCE]
        return any(
            np.isin(ours[ours != -1], theirs).any()
            for entry in waiting
            for ours, theirs in zip(tables, entry.tables, strict=True)
        )

    @property
    def empty(self) -> bool:
        """Whether the ledger is drained."""
        return not self._entries

    def dump(self) -> dict[str, object]:
        """Plain values for ``status_dump``."""
        entries, now = self.entries(), time.monotonic()
        by_owner = {owner.value: sum(e.blocks for e in entries if e.owner is owner) for owner in Owner}
        return {
            "blocks": by_owner,
            "entries": [
                {
                    "request_id": entry.request_id,
                    "owner": entry.owner.value,
                    "blocks": entry.blocks,
                    "seconds": round(now - entry.since, 3),
                    "freed_by": entry.freed_by,
                }
                for entry in entries
            ],
            "reclaimed": dict(self.reclaimed),
        }
