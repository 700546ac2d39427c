"""A transfer agent whose peers live in the same process, and whose faults are written in a script."""

import ctypes
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry_plugins.errors import TransferError
from kvferry_plugins.layout import Addresses
from kvferry_plugins.testing.faults import Corrupt, Delay, Drop, Duplicate, FailAfter, FailPost, Fault, Hold
from kvferry_plugins.transceiver import (
    Completion,
    Fence,
    PeerId,
    Region,
    RegistrationId,
    TransferAgent,
    TransferId,
)

_MAGIC = b"kvferry-scripted-agent\0"


class ScriptedHub:
    """Where scripted agents find each other; agents of two hubs cannot connect."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.agents: dict[bytes, ScriptedAgent] = {}
        self._serial = itertools.count(1)

    def admit(self, agent: "ScriptedAgent") -> bytes:
        """Enter an agent and return its descriptor, unique for the life of the hub and in no other process."""
        with self.lock:
            descriptor = _MAGIC + f"{agent.name}#{next(self._serial)}@{os.getpid()}".encode()
            self.agents[descriptor] = agent
            return descriptor


DEFAULT_HUB = ScriptedHub()
"""What agents use that were given no hub."""


@dataclass(frozen=True, slots=True)
class AgentCounters:
    """What an agent did so far, and what it still holds (the last three are 0 when nothing leaks)."""

    posted: int
    completed: int
    failed: int
    nbytes: int
    """Bytes that were really copied."""
    in_flight: int
    registrations: int
    peers: int


@dataclass(slots=True)
class _Transfer:
    id: TransferId
    peer_id: PeerId
    peer: "ScriptedAgent"
    segments: list[tuple[int, int, int]]
    """(source, destination, bytes)."""
    fault: Fault | None
    target_polls: int
    """How often the peer had polled when this was posted."""
    polls_left: int = 0
    due: float = 0.0
    held: bool = False
    written: int = 0
    """Segments that are already copied."""


@dataclass(slots=True)
class _Tally:
    posted: int = 0
    completed: int = 0
    failed: int = 0
    nbytes: int = 0
    polls: int = 0
    connects_to_refuse: int = 0
    ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))


class ScriptedAgent(TransferAgent):
    """A memcpy between two agents of one process; each agent may have a thread of its own.

    ``submit`` takes the next entry of ``script``: None is a clean transfer, and after the last entry all are clean.
    Addresses outside what both sides registered are refused, as a careful transport would. A write happens in
    ``poll`` of the writer, never in ``submit``, except for the segments that a fault says are written at once.

    Args:
        name: for messages; need not be unique.
        script: one fault, or None, for each ``submit`` to come.
        hub: where its peers are.
        wakeup: False = ``wakeup_fd`` is None, as with a transport that has none.
        target_must_poll: a write completes only once its target has polled since it was posted, as with NIXL.
        refuse_connections: how many of the next ``connect`` calls raise.
    """

    def __init__(
        self,
        name: str = "scripted",
        script: Iterable[Fault | None] = (),
        *,
        hub: ScriptedHub = DEFAULT_HUB,
        wakeup: bool = True,
        target_must_poll: bool = False,
        refuse_connections: int = 0,
    ) -> None:
        self.name = name
        self.script = deque(script)
        self.fence_answer: Fence | None = None
        """What ``fence`` says of every peer; None = FENCED once the peer is closed or killed, else IN_DOUBT."""
        self._hub = hub
        self._target_must_poll = target_must_poll
        self._tally = _Tally(connects_to_refuse=refuse_connections)
        self._regions: dict[RegistrationId, tuple[Region, ...]] = {}
        self._peers: dict[PeerId, ScriptedAgent] = {}
        self._in_flight: dict[TransferId, _Transfer] = {}
        self._timers: list[threading.Timer] = []
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if wakeup else None
        self._closed = False
        self._descriptor = hub.admit(self)

    # --- what a test asks and does ------------------------------------------------------------------------------

    @property
    def hub(self) -> ScriptedHub:
        """Where its peers are."""
        return self._hub

    @property
    def closed(self) -> bool:
        """Whether it was closed or killed."""
        return self._closed

    @property
    def counters(self) -> AgentCounters:
        """A snapshot; any thread may take it."""
        with self._hub.lock:
            tally = self._tally
            return AgentCounters(
                posted=tally.posted,
                completed=tally.completed,
                failed=tally.failed,
                nbytes=tally.nbytes,
                in_flight=len(self._in_flight),
                registrations=len(self._regions),
                peers=len(self._peers),
            )

    def release(self) -> int:
        """Let every held transfer go on, from any thread; returns how many there were."""
        with self._hub.lock:
            held = [transfer for transfer in self._in_flight.values() if transfer.held]
            for transfer in held:
                transfer.held = False
            self._wake()
            return len(held)

    def kill(self) -> None:
        """Die as a process does: nothing more is written from here, peers' writes fail, ``fence`` says FENCED."""
        self.close()

    # --- the transfer agent -------------------------------------------------------------------------------------

    def register(self, regions: Sequence[Region]) -> RegistrationId:
        """Note the regions: writes outside of them are refused."""
        for region in regions:
            if region.device != "cpu":
                raise TransferError(f"{self.name} serves memory on cpu, not on {region.device}")
        with self._hub.lock:
            self._require_open()
            registration = RegistrationId(next(self._tally.ids))
            self._regions[registration] = tuple(regions)
            return registration

    def deregister(self, registration: RegistrationId) -> None:
        """Forget the regions; bytes still to be written there are left out."""
        with self._hub.lock:
            if registration not in self._regions and not self._closed:
                raise TransferError(f"{self.name} has no registration {registration!r}; it has {sorted(self._regions)}")
            self._regions.pop(registration, None)

    def local_descriptor(self) -> bytes:
        """The name under which the hub knows this agent."""
        self._require_open()
        return self._descriptor

    def connect(self, descriptor: bytes) -> PeerId:
        """Learn a peer of the same hub."""
        with self._hub.lock:
            self._require_open()
            if self._tally.connects_to_refuse > 0:
                self._tally.connects_to_refuse -= 1
                raise TransferError(f"{self.name}: the script refuses this connection")
            agent = self._hub.agents.get(descriptor)
            if agent is None:
                raise TransferError(f"{self.name}: {descriptor[:40]!r} describes no living scripted agent of this hub")
            peer = PeerId(next(self._tally.ids))
            self._peers[peer] = agent
            return peer

    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer; its transfers in flight are never reported."""
        with self._hub.lock:
            self._peers.pop(peer, None)
            for transfer in [each for each in self._in_flight.values() if each.peer_id == peer]:
                del self._in_flight[transfer.id]

    def submit(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses) -> TransferId:
        """Post, or do what the script says."""
        with self._hub.lock:
            self._require_open()
            target = self._target(peer)
            segments = _segments(src, dst, nbytes)
            self._check(segments, target)
            fault = self.script.popleft() if self.script else None
            if isinstance(fault, FailPost):
                raise TransferError(f"{self.name}: the script refuses this post")
            transfer = _Transfer(TransferId(next(self._tally.ids)), peer, target, segments, fault, target._tally.polls)
            self._tally.posted += 1
            self._in_flight[transfer.id] = transfer
            self._begin(transfer)
            return transfer.id

    def poll(self) -> list[Completion]:
        """Copy what is due, and report it."""
        with self._hub.lock:
            self._tally.polls += 1
            self._drain_wakeup()
            self._wake_writers()
            completions = [
                completion for transfer in list(self._in_flight.values()) for completion in self._step(transfer)
            ]
            if any(transfer.polls_left for transfer in self._in_flight.values()):
                self._wake()
            return completions

    def wakeup_fd(self) -> int | None:
        """An eventfd, or None if the agent was made without."""
        return self._wakeup

    def fence(self, peer: PeerId) -> Fence:
        """``fence_answer`` if a test has set it, else whether the peer is closed."""
        with self._hub.lock:
            if self.fence_answer is not None:
                return self.fence_answer
            return Fence.FENCED if self._target(peer).closed else Fence.IN_DOUBT

    def close(self) -> None:
        """Stop; whatever was in flight never lands."""
        with self._hub.lock:
            if self._closed:
                return
            self._closed = True
            self._hub.agents.pop(self._descriptor, None)
            for timer in self._timers:
                timer.cancel()
            for holding in (self._in_flight, self._peers, self._regions, self._timers):
                holding.clear()
            if self._wakeup is not None:
                os.close(self._wakeup)
                self._wakeup = None

    # --- one transfer -------------------------------------------------------------------------------------------

    def _begin(self, transfer: _Transfer) -> None:
        """Write what the fault says is written at once, and set the clocks."""
        fault = transfer.fault
        if isinstance(fault, Hold):
            transfer.held = True
            self._write(transfer, fault.written)
        elif isinstance(fault, Delay):
            transfer.polls_left = fault.polls
            transfer.due = time.monotonic() + fault.seconds
            self._write(transfer, fault.written)
            self._wake_after(fault.seconds)
        self._wake()
        if self._target_must_poll:
            transfer.peer._wake()

    def _step(self, transfer: _Transfer) -> list[Completion]:
        fault = transfer.fault.then if isinstance(transfer.fault, Delay | Hold) else transfer.fault
        if isinstance(fault, Drop):
            return []
        if transfer.peer.closed:
            return self._fail(transfer, f"{transfer.peer.name} is gone")
        if self._waits(transfer):
            return []
        if isinstance(fault, FailAfter):
            self._write(transfer, fault.segments)
            return self._fail(transfer, f"the script fails it after {fault.segments} segments")
        self._write(transfer, len(transfer.segments))
        if isinstance(fault, Corrupt):
            self._flip(transfer, fault.offset)
        return self._succeed(transfer, times=2 if isinstance(fault, Duplicate) else 1)

    def _waits(self, transfer: _Transfer) -> bool:
        if transfer.held or transfer.due > time.monotonic():
            return True
        if transfer.polls_left > 0:
            transfer.polls_left -= 1
            return True
        return self._target_must_poll and transfer.peer._tally.polls <= transfer.target_polls

    def _write(self, transfer: _Transfer, segments: int) -> None:
        """Copy up to the ``segments``-th segment, skipping what is copied already."""
        for source, destination, nbytes in transfer.segments[transfer.written : segments]:
            if not transfer.peer._covers(destination, nbytes):
                continue  # the target took its memory away: a real transport would fault or write into the void
            ctypes.memmove(destination, source, nbytes)
            self._tally.nbytes += nbytes
        transfer.written = max(transfer.written, min(segments, len(transfer.segments)))

    def _flip(self, transfer: _Transfer, offset: int) -> None:
        """Invert one byte of what arrived, counted over all segments."""
        for _, destination, nbytes in transfer.segments:
            if offset < nbytes:
                if transfer.peer._covers(destination, nbytes):
                    ctypes.c_ubyte.from_address(destination + offset).value ^= 0xFF
                return
            offset -= nbytes

    def _succeed(self, transfer: _Transfer, *, times: int) -> list[Completion]:
        del self._in_flight[transfer.id]
        self._tally.completed += 1
        return [Completion(transfer.id, ok=True)] * times

    def _fail(self, transfer: _Transfer, error: str) -> list[Completion]:
        del self._in_flight[transfer.id]
        self._tally.failed += 1
        return [Completion(transfer.id, ok=False, error=f"{self.name}: {error}")]

    # --- checks and wake-ups ------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError(f"{self.name} is closed")

    def _target(self, peer: PeerId) -> "ScriptedAgent":
        if peer not in self._peers:
            raise TransferError(f"{self.name} has no peer {peer!r}; it has {sorted(self._peers)}")
        return self._peers[peer]

    def _check(self, segments: Iterable[tuple[int, int, int]], target: "ScriptedAgent") -> None:
        if target.closed:
            raise TransferError(f"{self.name}: {target.name} is gone")
        for source, destination, nbytes in segments:
            for agent, address in ((self, source), (target, destination)):
                if not agent._covers(address, nbytes):
                    raise TransferError(f"{agent.name} has not registered {nbytes} bytes at {address:#x}")

    def _covers(self, address: int, nbytes: int) -> bool:
        return nbytes >= 0 and any(
            region.address <= address and address + nbytes <= region.address + region.nbytes
            for regions in self._regions.values()
            for region in regions
        )

    def _wake(self) -> None:
        if self._wakeup is not None:
            os.eventfd_write(self._wakeup, 1)

    def _wake_writers(self) -> None:
        """Tell whoever writes here that this target has polled."""
        for agent in self._hub.agents.values():
            if any(transfer.peer is self for transfer in agent._in_flight.values()):
                agent._wake()

    def _wake_after(self, seconds: float) -> None:
        if seconds > 0 and self._wakeup is not None:
            timer = threading.Timer(seconds, self._wake_locked)
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

    def _wake_locked(self) -> None:
        with self._hub.lock:
            self._wake()

    def _drain_wakeup(self) -> None:
        if self._wakeup is not None:
            try:
                os.eventfd_read(self._wakeup)
            except BlockingIOError:
                return


def _segments(src: Addresses, dst: Addresses, nbytes: Addresses) -> list[tuple[int, int, int]]:
    if not len(src) == len(dst) == len(nbytes):
        raise TransferError(f"{len(src)} sources, {len(dst)} destinations and {len(nbytes)} sizes do not match")
    columns = (np.asarray(column, dtype=np.int64).tolist() for column in (src, dst, nbytes))
    return list(zip(*columns, strict=True))
