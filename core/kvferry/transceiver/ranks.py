"""The ranks of one instance: how they meet at rank 0, and how each hears that another is lost."""

import secrets
import threading
from collections.abc import Callable
from typing import Any

from kvferry.transceiver.channel import NOBODY_LISTENS, Address
from kvferry.transceiver.gathering import Gathering, missing_ranks, topology_of
from kvferry.transceiver.shared import Shared, logger
from kvferry.transceiver.wire import PROTOCOL, AnyMessage, Gathered, Join, Lost, MalformedMessageError, Ping, Refuse
from kvferry.transceiver.world import Member, World, member_to_wire, members_from_wire
from kvferry_plugins.errors import HandshakeError, KvferryError, PeerLostError, TransferError
from kvferry_plugins.types import RankSpec

REDIAL_SECONDS = 0.2
"""From a failed connection to rank 0 to the next."""

FAREWELL_SECONDS = 10.0
"""How long rank 0, once it knows that the instance cannot come together, waits for those that it has not told."""

GRACE_SECONDS = 20.0
"""How much longer than the clock a start waits for the loop to say that it ran out."""


class Ranks:
    """One rank's view of its instance. All but ``wait`` belongs to the loop's thread.

    Args:
        shared: this rank.
        spec: None, or a topology of one rank: nobody else is to be met.
        on_world: told once that the instance is complete, if there was somebody to meet.
        on_lost: told once that a rank is gone, with the error that names it.
    """

    def __init__(
        self,
        shared: Shared,
        spec: RankSpec | None,
        on_world: Callable[[], None],
        on_lost: Callable[[PeerLostError], None],
    ) -> None:
        self._shared = shared
        self._spec = spec if spec is not None and spec.topology.ranks > 1 else None
        self._on_world = on_world
        self._on_lost = on_lost
        self.error: KvferryError | None = None
        """Why the instance did not come together."""
        self.lost: PeerLostError | None = None
        """The first rank that is gone; the instance does nothing any more."""
        self._settled = threading.Event()
        self._addresses: dict[int, Address] = {}
        """Of the ranks that this one speaks to: rank 0 to all, the others to rank 0."""
        self._watched: dict[Address, int] = {}
        """Connections whose end is the end of a rank."""
        self._heard: dict[int, float] = {}
        self._missing: list[int] = []
        self._refused: set[Address] = set()
        self._redial = float("inf")
        self._next_ping = 0.0
        self._trouble = ""
        self._deadline = float("inf")
        self._gathering = Gathering(spec, shared.role, shared.fingerprint) if spec is not None else None
        if (
            self._is_first and self._gathering is not None
        ):  # at once: another rank may come before the loop's first step
            self._gathering.members[0] = self._own(0)
        if self._spec is None:
            self._begin((self._own(0),), 0, b"")

    # --- what others ask -----------------------------------------------------------------------------------------

    @property
    def world(self) -> World | None:
        """The instance, once it is complete."""
        return self._shared.world

    @property
    def watched(self) -> bool:
        """Whether there are clocks: others to come, or to stay."""
        return self._spec is not None and (self.error is None or not self._settled.is_set())

    def start(self) -> None:
        """Meet the others."""
        if self._spec is None:
            return
        self._deadline = self._shared.now() + self._spec.join_timeout_ms / 1000
        if not self._is_first:
            self._missing = [0]
            self._dial()

    def wait(self) -> None:
        """Wait, on another thread than the loop's, until the instance is complete.

        Raises:
            HandshakeError: who is missing, there twice, or another kind; the same on every rank.
        """
        seconds = self._spec.join_timeout_ms / 1000 if self._spec is not None else 0
        if not self._settled.wait(seconds + GRACE_SECONDS):
            raise TransferError("the transfer loop did not say whether the ranks have joined")
        if self.error is not None:
            raise self.error

    def send(self, rank: int, message: AnyMessage) -> None:
        """Tell another rank; only rank 0 reaches all."""
        address = self._addresses.get(rank)
        if address is not None:
            self._shared.send(address, message)

    def broadcast(self, message: AnyMessage) -> None:
        """Rank 0: tell all others."""
        for address in self._addresses.values():
            self._shared.send(address, message)

    def rank_of(self, address: Address) -> int | None:
        """Which rank of this instance an address belongs to."""
        return next((rank for rank, known in self._addresses.items() if known == address), None)

    def dump(self) -> dict[str, object]:
        """Plain values for ``status_dump``."""
        world, now = self.world, self._shared.now()
        state = "lost" if self.lost else "failed" if self.error else "joining" if world is None else "complete"
        return {
            "rank": self._spec.rank if self._spec is not None else 0,
            "size": self._spec.topology.ranks if self._spec is not None else 1,
            "state": state,
            "error": str(self.lost or self.error or ""),
            "missing": self._gathering.missing
            if self._is_first and world is None and self._gathering
            else self._missing,
            "heard_seconds_ago": {
                str(rank): round(now - heard, 3) for rank, heard in sorted(dict(self._heard).items())
            },
        }

    # --- meeting -------------------------------------------------------------------------------------------------

    @property
    def _is_first(self) -> bool:
        return self._spec is not None and self._spec.rank == 0

    def _own(self, rank: int) -> Member:
        shared = self._shared
        return Member(rank, shared.channel.endpoint, shared.instance, shared.incarnation, shared.layout)

    def _dial(self) -> None:
        """Say JOIN to rank 0, over a new connection."""
        assert self._spec is not None
        self._redial = float("inf")
        try:
            address = self._shared.channel.connect(self._spec.rendezvous)
        except TransferError as error:
            self._fail(HandshakeError(f"rank 0 cannot be joined: {error}"))
            return
        self._addresses, self._watched = {0: address}, {address: 0}
        join = Join(
            protocol=PROTOCOL,
            role=self._shared.role.value,
            topology=topology_of(self._spec),
            data_rank=self._spec.data_rank,
            member=member_to_wire(self._own(self._spec.rank)),
            fingerprint=dict(self._shared.fingerprint.fields),
        )
        self._shared.send(address, join)

    def on_join(self, address: Address, join: Join) -> None:
        """Rank 0: another rank is here."""
        gathering, world = self._gathering, self.world
        if self._is_first and world is not None and self._addresses.get(join.member.rank) == address:
            self._shared.send(address, _as_message(world))  # over a new connection, before it heard
            return
        if self._is_first and isinstance(self.error, HandshakeError):
            self._refuse(address, self.error)
            self._settle_failure()
            return
        if not self._is_first or gathering is None or world is not None or self.error is not None:
            reason = "this worker is no rank 0 that waits for ranks: restart all ranks of the instance together"
            self._shared.send(address, Refuse(field="rank", reason=reason))
            return
        try:
            member = gathering.admit(join)
            self._watch(member)
        except (HandshakeError, MalformedMessageError, TransferError) as error:
            refusal = HandshakeError(
                str(error) if isinstance(error, HandshakeError) else f"rank {join.member.rank} cannot join: {error}",
                fields=error.fields if isinstance(error, HandshakeError) else {},
            )
            self._refuse(address, refusal)
            self._fail(refusal)
            return
        self._addresses[member.rank] = address
        self._heard[member.rank] = self._shared.now()
        self._tell_gathered(gathering)

    def _watch(self, member: Member) -> None:
        """Open a connection whose end says at once that the rank has ended."""
        self._watched[self._shared.channel.connect(member.endpoint)] = member.rank

    def _tell_gathered(self, gathering: Gathering) -> None:
        if gathering.missing:
            self.broadcast(Gathered(missing=gathering.missing))
            return
        members = tuple(gathering.members[rank] for rank in sorted(gathering.members))
        self._begin(members, 0, secrets.token_bytes(32))
        assert self.world is not None
        self.broadcast(_as_message(self.world))

    def on_gathered(self, address: Address, gathered: Gathered) -> None:
        """Another rank: hear from rank 0 who is there."""
        if self._spec is None or self.rank_of(address) != 0 or self.world is not None or self.error is not None:
            self._shared.counters["late_messages"] += 1
            return
        self._missing, self._heard[0] = list(gathered.missing), self._shared.now()
        if not gathered.missing:
            self._begin(members_from_wire(gathered.members), self._spec.rank, gathered.secret)

    def _begin(self, members: tuple[Member, ...], rank: int, secret: bytes) -> None:
        self._shared.world = World(members, rank, secret)
        self._settled.set()
        if self._spec is not None:
            logger.info("rank %d of %d: all ranks have joined", rank, len(members))
            self._on_world()

    def on_refuse(self, address: Address, refuse: Refuse) -> bool:
        """Hear that this instance did not come together; False: the refusal is about something else."""
        if self._spec is None or self.world is not None or self.rank_of(address) != 0:
            return False
        self._fail(HandshakeError(refuse.reason, fields=dict(refuse.fields)))
        return True

    def _refuse(self, address: Address, error: HandshakeError) -> None:
        self._refused.add(address)
        fields: dict[str, Any] = dict(error.fields)
        self._shared.send(address, Refuse(field="ranks", reason=str(error)[:4000], fields=fields))

    def _fail(self, error: KvferryError) -> None:
        """The instance does not come together: on no rank of it."""
        if self.error is not None:
            return
        self.error = error
        if self._is_first and isinstance(error, HandshakeError):
            self._deadline = min(self._deadline, self._shared.now() + FAREWELL_SECONDS)
            for address in self._addresses.values():
                self._refuse(address, error)
            self._settle_failure()
        else:
            if self._spec is not None:
                self.send(0, Lost(rank=self._spec.rank, reason=str(error)[:4000]))
            self._settled.set()

    def _settle_failure(self) -> None:
        """Rank 0: let the start fail here too, when everybody has heard, or nobody else is to be waited for."""
        others = self._spec.topology.ranks - 1 if self._spec is not None else 0
        if len(self._refused) >= others or self._shared.now() >= self._deadline:
            self._settled.set()

    # --- staying together ----------------------------------------------------------------------------------------

    def hear(self, address: Address) -> None:
        """Note that a rank said something."""
        rank = self.rank_of(address) if self._addresses else None
        if rank is not None:
            self._heard[rank] = self._shared.now()

    def broken(self, address: Address, reason: str) -> bool:
        """A connection to a rank ended; False: it is none of ours."""
        rank = self._watched.get(address)
        if rank is None:
            return False
        if self.world is not None:
            self._lose(rank, f"its process ended, or cannot be reached: {reason}")
        elif self._is_first:
            self._fail(HandshakeError(f"rank {rank} joined and went away again: {reason}"))
        elif self.error is None:
            self._trouble = reason
            if reason != NOBODY_LISTENS:  # rank 0 was restarted, or refused our key
                self._shared.channel.disconnect(address)
                self._redial = self._shared.now() + REDIAL_SECONDS
        return True

    def on_told_lost(self, address: Address, lost: Lost) -> None:
        """A rank is gone, or leaves."""
        if self.rank_of(address) is None:
            self._shared.counters["misdirected_messages"] += 1
        elif self.world is not None:
            self._lose(lost.rank, lost.reason)
        elif self._is_first and self._spec is not None:  # its clock ran out before ours
            self._fail(self._timeout(self._spec))

    def _lose(self, rank: int, reason: str) -> None:
        """Nothing can be handed over any more without that rank."""
        if self.lost is not None:
            return
        self.lost = PeerLostError(f"rank {rank} of this instance is lost: {reason}; restart all ranks of it")
        logger.warning("%s", self.lost)
        if self._is_first:
            self.broadcast(Lost(rank=rank, reason=reason[:4000]))
        self._on_lost(self.lost)

    def leave(self) -> None:
        """Tell the others that this rank ends."""
        if self._spec is None or self.world is None or self.lost is not None:
            return
        lost = Lost(rank=self._spec.rank, reason="it is shutting down")
        self.lost = PeerLostError("this worker is shutting down")
        if self._is_first:
            self.broadcast(lost)
        else:
            self.send(0, lost)

    def tick(self) -> None:
        """Let clocks run out: of the meeting, then of each rank's silence."""
        if not self.watched or self._spec is None:
            return
        now = self._shared.now()
        if self.error is not None:
            self._settle_failure()
        elif self.world is None:
            self._tick_meeting(self._spec, now)
        elif self.lost is None:
            self._tick_liveness(now)

    def _tick_meeting(self, spec: RankSpec, now: float) -> None:
        if now >= self._deadline:
            self._fail(self._timeout(spec))
        elif now >= self._redial:
            self._dial()

    def _timeout(self, spec: RankSpec) -> HandshakeError:
        missing = self._gathering.missing if self._is_first and self._gathering is not None else self._missing
        detail = f"rank 0 is expected at {spec.rendezvous}: {self._trouble}" if missing == [0] else ""
        return missing_ranks(missing, spec.topology.ranks, spec.join_timeout_ms / 1000, detail)

    def _tick_liveness(self, now: float) -> None:
        clocks = self._shared.clocks
        if not self._is_first and now >= self._next_ping:
            self._next_ping = now + clocks.ping
            self.send(0, Ping(instance=self._shared.instance, incarnation=self._shared.incarnation))
        for rank, heard in self._heard.items():
            if now - heard > clocks.rank_silence:
                self._lose(rank, f"it has said nothing for {now - heard:.1f} s")
                return


def _as_message(world: World) -> Gathered:
    return Gathered(missing=[], members=[member_to_wire(member) for member in world.members], secret=world.secret)
