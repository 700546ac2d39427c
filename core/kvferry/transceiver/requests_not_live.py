"""What a context worker knows of requests that are not live: over already, cancelled early, or still to come."""

import hmac
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.transceiver.channel import Address
from kvferry.transceiver.links import Link
from kvferry.transceiver.sends import Send, SendState
from kvferry.transceiver.wire import Cancelled, Done, Key, Table

TOMBSTONES = 4096
HELD_TABLES = 1024


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is left of a finished send: enough to answer a late or doubled message."""

    token: bytes
    key: Key | None
    answers: Mapping[str, Done | Cancelled]
    """By peer that took part in the last attempt."""
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
        self._held: OrderedDict[tuple[int, Address], HeldTable] = OrderedDict()
        self._cancelled: OrderedDict[tuple[Address, Key], None] = OrderedDict()

    # --- over ----------------------------------------------------------------------------------------------------

    def bury(self, send: Send, answers: Mapping[str, Done | Cancelled]) -> None:
        """Keep what a doubled message needs to hear."""
        key = send.attempt.key if send.attempt is not None else None
        self._tombstones[send.request_id] = Tombstone(send.token, key, answers, send.state, send.reason)
        while len(self._tombstones) > TOMBSTONES:
            self._tombstones.popitem(last=False)

    def is_over(self, request_id: int) -> bool:
        """Whether the request was here, and ended."""
        return request_id in self._tombstones

    def tombstone(self, request_id: int, token: bytes) -> Tombstone | None:
        """What is left of a request, for who knows its token."""
        tombstone = self._tombstones.get(request_id)
        return tombstone if tombstone is not None and hmac.compare_digest(tombstone.token, token) else None

    def was_over_with(self, key: Key) -> bool:
        """Whether that attempt was the last of a request that ended."""
        tombstone = self._tombstones.get(key.request)
        return tombstone is not None and tombstone.key == key

    # --- cancelled before its TABLE was accepted -----------------------------------------------------------------

    def cancel(self, address: Address, key: Key) -> None:
        """Remember that an attempt was told CANCELLED: it must not be served, not even if its TABLE is held."""
        held = self._held.get((key.request, address))
        if held is not None and held.table.key == key:
            del self._held[key.request, address]
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
        self._held[held.table.key.request, held.link.address] = held
        return True

    def take_held(self, request_id: int) -> list[HeldTable]:
        """The TABLEs that wait for a request, of each rank of a peer one."""
        return [self._held.pop(name) for name in list(self._held) if name[0] == request_id]

    def take_expired(self, now: float) -> list[HeldTable]:
        """The TABLEs that waited too long."""
        names = [name for name, held in self._held.items() if held.deadline <= now]
        return [self._held.pop(name) for name in names]

    @property
    def held(self) -> int:
        """TABLEs that wait for their requests."""
        return len(self._held)
