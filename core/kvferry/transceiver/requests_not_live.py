"""What a context worker knows of requests that are not live: over already, cancelled early, or still to come."""

import hmac
from collections import OrderedDict
from dataclasses import dataclass

from kvferry.transceiver.channel import Address
from kvferry.transceiver.links import Link
from kvferry.transceiver.sends import Send, SendState
from kvferry.transceiver.wire import Cancelled, Done, Failed, Key, Table

TOMBSTONES = 4096
HELD_TABLES = 1024


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is left of a finished send: enough to answer a late or doubled message."""

    token: bytes
    key: Key | None
    answer: Done | Failed | Cancelled | None
    state: SendState
    reason: str = ""
    """Why it was cancelled."""


@dataclass(frozen=True, slots=True)
class HeldTable:
    """A TABLE that came before its request (generation-first)."""

    link: Link
    table: Table
    deadline: float


class RequestsNotLive:
    """Bounded memory, oldest forgotten first."""

    def __init__(self) -> None:
        self._tombstones: OrderedDict[int, Tombstone] = OrderedDict()
        self._held: OrderedDict[int, HeldTable] = OrderedDict()
        self._cancelled: OrderedDict[tuple[Address, Key], None] = OrderedDict()

    # --- over ----------------------------------------------------------------------------------------------------

    def bury(self, send: Send, answer: Done | Cancelled | None) -> None:
        """Keep what a doubled message needs to hear."""
        key = send.delivery.key if send.delivery is not None else None
        self._tombstones[send.request_id] = Tombstone(send.token, key, answer, send.state, send.reason)
        while len(self._tombstones) > TOMBSTONES:
            self._tombstones.popitem(last=False)

    def is_over(self, request_id: int) -> bool:
        """Whether the request was here, and ended."""
        return request_id in self._tombstones

    def tombstone(self, request_id: int, token: bytes) -> Tombstone | None:
        """What is left of a request, for who knows its token."""
        tombstone = self._tombstones.get(request_id)
        return tombstone if tombstone is not None and hmac.compare_digest(tombstone.token, token) else None

    # --- cancelled before its TABLE was accepted -----------------------------------------------------------------

    def cancel(self, address: Address, key: Key) -> None:
        """Remember that an attempt was told CANCELLED: it must not be served, not even if its TABLE is held."""
        held = self._held.get(key.request)
        if held is not None and (held.link.address, held.table.key) == (address, key):
            del self._held[key.request]
        if not self.is_over(key.request):
            self._cancelled[address, key] = None
            while len(self._cancelled) > TOMBSTONES:
                self._cancelled.popitem(last=False)

    def is_cancelled(self, address: Address, key: Key) -> bool:
        """Whether that attempt was told CANCELLED."""
        return (address, key) in self._cancelled

    # --- still to come -------------------------------------------------------------------------------------------

    def hold(self, held: HeldTable) -> bool:
        """Keep a TABLE for its request; False: too many wait already."""
        if len(self._held) >= HELD_TABLES:
            return False
        self._held[held.table.key.request] = held
        return True

    def take_held(self, request_id: int) -> HeldTable | None:
        """The TABLE that waits for a request, if one does."""
        return self._held.pop(request_id, None)

    def take_expired(self, now: float) -> list[HeldTable]:
        """The TABLEs that waited too long."""
        expired = [held for held in self._held.values() if held.deadline <= now]
        for held in expired:
            del self._held[held.table.key.request]
        return expired

    @property
    def held(self) -> int:
        """TABLEs that wait for their requests."""
        return len(self._held)
