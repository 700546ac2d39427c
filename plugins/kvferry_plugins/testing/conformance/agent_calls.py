"""One agent under test with the memory that it serves, and its calls, in whatever process it lives."""

import enum
import select
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry_plugins.errors import KvferryError
from kvferry_plugins.layout import Addresses
from kvferry_plugins.transceiver import (
    BlockTransferAgent,
    Completion,
    Fence,
    PeerId,
    Region,
    RegistrationId,
    TransferAgent,
    TransferId,
)

GUARD_BYTES = 64 << 10
"""Before and behind the registered memory: nobody may write there."""

GUARD_VALUE = 0xA5

Bytes = NDArray[np.uint8]


class Progress(enum.Enum):
    """When a side calls ``poll``."""

    EAGER = "eager"
    """All the time, as the loop does of an agent without a wake-up descriptor."""
    WOKEN = "woken"
    """After a call, and whenever the wake-up descriptor is readable."""
    STILL = "still"
    """Never: a worker that is busy elsewhere."""


def pattern(seed: int, nbytes: int) -> Bytes:
    """Bytes that no other seed has."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class AgentCalls:
    """What the checks ask of one agent; every argument and answer can be pickled.

    Args:
        make_agent: makes the agent from its name.
        name: for ``make_agent``.
    """

    def __init__(self, make_agent: Callable[[str], TransferAgent], name: str) -> None:
        self.name = name
        self.progress = Progress.EAGER
        self._make_agent = make_agent
        self._agent: TransferAgent | None = None
        self._memory: Bytes = np.zeros(0, dtype=np.uint8)
        self._nbytes = 0
        self._registrations: list[RegistrationId] = []
        self._given_back: list[RegistrationId] = []
        self._completions: list[Completion] = []
        self._woken = False
        self._peers: list[PeerId] = []
        self._maps: dict[tuple[int, ...], object] = {}

    # --- life ---------------------------------------------------------------------------------------------------

    def begin(self, nbytes: int, regions: int = 1) -> None:
        """Make the agent, unless there is one, and register memory in so many equal regions."""
        if self._agent is None:
            self._agent = self._make_agent(self.name)
        self._memory = np.full(GUARD_BYTES + nbytes + GUARD_BYTES, GUARD_VALUE, dtype=np.uint8)
        self._nbytes = nbytes
        self.fill(value=0)
        each = nbytes // regions
        cuts = [Region(self.base() + number * each, each) for number in range(regions)]
        # In one call and in several: both must do.
        for part in (cuts[: regions // 2], cuts[regions // 2 :]):
            if part:
                self._registrations.append(self.agent.register(part))
        self.progress = Progress.EAGER
        self.agent.set_active(True)

    def end(self, keep_agent: bool = False) -> None:
        """Give the memory back and close the agent, unless it has to last."""
        self.progress = Progress.STILL
        if self._agent is None:
            return
        for registration in self._registrations:
            self._agent.deregister(registration)
        self._registrations.clear()
        self._maps.clear()
        self._completions.clear()
        peers, self._peers = self._peers, []
        if keep_agent:
            for peer in peers:
                self._agent.disconnect(peer)
        else:
            self._agent.close()
            self._agent = None

    @property
    def agent(self) -> TransferAgent:
        """The agent, which must have begun."""
        assert self._agent is not None, f"{self.name} has no agent"
        return self._agent

    def step(self) -> None:
        """What the worker's loop does once."""
        if self._agent is None or self.progress is Progress.STILL:
            return
        if self.progress is Progress.EAGER or self._woken or self.is_readable():
            self._woken = False
            self.poll()

    def set_progress(self, progress: Progress) -> None:
        """Say when ``poll`` is called."""
        self.progress = progress
        self._woken = True

    # --- memory -------------------------------------------------------------------------------------------------

    def base(self) -> int:
        """Address of the registered memory."""
        return self._memory.ctypes.data + GUARD_BYTES

    def fill(self, value: int | None = None, seed: int = 0) -> None:
        """Fill the registered memory with one value, or with a pattern."""
        self._registered()[:] = pattern(seed, self._nbytes) if value is None else value

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Copy registered memory."""
        return self._registered()[offset : None if nbytes is None else offset + nbytes].tobytes()

    def guards_are_whole(self) -> bool:
        """Whether nobody has written beside the registered memory."""
        ends = self._memory[:GUARD_BYTES], self._memory[GUARD_BYTES + self._nbytes :]
        return all(bool((end == GUARD_VALUE).all()) for end in ends)

    def changes_within(self, seconds: float) -> int:
        """Bytes of the registered memory that change while ``poll`` is called for so long."""
        before = self._registered().copy()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
            time.sleep(1e-3)
        return int(np.count_nonzero(before != self._registered()))

    def _registered(self) -> Bytes:
        return self._memory[GUARD_BYTES : GUARD_BYTES + self._nbytes]

    def register_again(self, count: int, nbytes: int) -> None:
        """Register and deregister memory that nobody writes to, so many times."""
        scratch = np.zeros(nbytes, dtype=np.uint8)
        for _ in range(count):
            self.agent.deregister(self.agent.register([Region(scratch.ctypes.data, nbytes)]))

    def forget_registration(self, which: int) -> None:
        """Deregister one of those of ``begin``."""
        self.agent.deregister(self._registrations.pop(which))

    def deregister_twice(self) -> str:
        """Deregister one of those of ``begin`` twice; says what the second did."""
        registration = self._registrations.pop()
        self.agent.deregister(registration)
        return _said(lambda: self.agent.deregister(registration))

    def register_on(self, device: str) -> None:
        """Register memory of another device than the agent's."""
        self.agent.register([Region(self.base(), 4096, device)])

    def registrations(self) -> list[RegistrationId]:
        """Those of ``begin`` that stand."""
        return list(self._registrations)

    # --- the agent's calls --------------------------------------------------------------------------------------

    def descriptor(self) -> bytes:
        """As ``local_descriptor``."""
        return self.agent.local_descriptor()

    def connect(self, descriptor: bytes) -> PeerId:
        """As the agent's."""
        self._woken = True
        peer = self.agent.connect(descriptor)
        self._peers.append(peer)
        return peer

    def disconnect(self, peer: PeerId) -> None:
        """As the agent's."""
        self.agent.disconnect(peer)

    def submit(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses) -> TransferId:
        """As the agent's, with addresses."""
        self._woken = True
        return self.agent.submit(peer, src, dst, nbytes)

    def submit_strided(self, peer: PeerId, rows: Addresses) -> TransferId:
        """Submit the columns of int64[n, 3] as they lie: none is contiguous."""
        self._woken = True
        return self.agent.submit(peer, rows[:, 0], rows[:, 1], rows[:, 2])

    def submit_timed(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses) -> tuple[TransferId, float]:
        """Submit, and say how many seconds that took."""
        begun = time.monotonic()
        transfer = self.submit(peer, src, dst, nbytes)
        return transfer, time.monotonic() - begun

    def poll(self) -> None:
        """Poll once and keep what is reported."""
        self._completions += self.agent.poll()

    def reported(self) -> list[Completion]:
        """All completions of this test, in order."""
        return list(self._completions)

    def completion_of(self, transfer: TransferId) -> Completion | None:
        """The completion of a transfer, if it has come."""
        return next((each for each in reversed(self._completions) if each.id == transfer), None)

    def fence(self, peer: PeerId) -> Fence:
        """As the agent's."""
        return self.agent.fence(peer)

    def route(self, peer: PeerId) -> str:
        """As the agent's."""
        return self.agent.route(peer)

    def facts(self) -> dict[str, Any]:
        """What the agent says of itself."""
        agent = self.agent
        return {
            "library": agent.library,
            "unusable": agent.unusable,
            "wakeup_fd": agent.wakeup_fd(),
            "takes_blocks": isinstance(agent, BlockTransferAgent),
            "is_agent": isinstance(agent, TransferAgent),
        }

    def set_active(self, active: bool) -> None:
        """As the agent's."""
        self.agent.set_active(active)

    def is_readable(self) -> bool:
        """Whether the wake-up descriptor says that ``poll`` has work."""
        descriptor = self.agent.wakeup_fd()
        return descriptor is not None and bool(select.select([descriptor], [], [], 0)[0])

    def close_agent(self) -> None:
        """Close the agent and keep it, to see how it behaves afterwards."""
        self.progress = Progress.STILL
        self.agent.close()
        self._given_back, self._registrations = self._registrations, []

    def try_after_close(self, peer: PeerId) -> dict[str, str]:
        """Say what each method does by now: nothing, an answer's repr, or its error."""
        one = np.zeros(1, dtype=np.int64)
        calls: dict[str, Callable[[], object]] = {
            "register": lambda: self.agent.register([Region(self.base(), 4096)]),
            "local_descriptor": self.agent.local_descriptor,
            "connect": lambda: self.agent.connect(b"anybody"),
            "submit": lambda: self.agent.submit(peer, one, one, one),
            "disconnect": lambda: self.agent.disconnect(peer),
            "deregister": lambda: self.agent.deregister(self._given_back[0]),
            "poll": self.agent.poll,
            "close": self.agent.close,
        }
        return {name: _said(call) for name, call in calls.items()}

    def make_another(self) -> None:
        """Make a second agent beside the first, and close it."""
        self._make_agent(f"{self.name}-another").close()


def _said(call: Callable[[], object]) -> str:
    try:
        answer = call()
    except Exception as error:
        kind = "TransferError" if isinstance(error, KvferryError) else type(error).__name__
        return f"{kind}: {error}"
    return "nothing" if answer is None else repr(answer)
