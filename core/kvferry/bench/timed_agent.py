"""A transfer agent that hands everything on to another, and keeps the time of posting and of the wire."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvferry_plugins.layout import Addresses, BlockIds, PoolCopy
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


def timed(agent: TransferAgent) -> "TimedAgent":
    """Wrap an agent by one of its own kind."""
    return TimedBlockAgent(agent) if isinstance(agent, BlockTransferAgent) else TimedAgent(agent)


class TimedAgent(TransferAgent):
    """Wraps ``agent``; ``take_figures`` gives the seconds since it was last asked."""

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self.library = agent.library
        self._posting = 0.0
        self._first_post: float | None = None
        self._last_completion = 0.0

    @property
    def unusable(self) -> str | None:
        """Hand on."""
        return self._agent.unusable

    def register(self, regions: Sequence[Region]) -> RegistrationId:
        """Hand on."""
        return self._agent.register(regions)

    def deregister(self, registration: RegistrationId) -> None:
        """Hand on."""
        self._agent.deregister(registration)

    def local_descriptor(self) -> bytes:
        """Hand on."""
        return self._agent.local_descriptor()

    def connect(self, descriptor: bytes) -> PeerId:
        """Hand on."""
        return self._agent.connect(descriptor)

    def disconnect(self, peer: PeerId) -> None:
        """Hand on."""
        self._agent.disconnect(peer)

    def submit(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses) -> TransferId:
        """Hand on, and keep the time."""
        with self._posting_timed():
            return self._agent.submit(peer, src, dst, nbytes)

    def poll(self) -> list[Completion]:
        """Hand on, and keep the time of completions."""
        completions = self._agent.poll()
        if completions:
            self._last_completion = time.monotonic()
        return completions

    def route(self, peer: PeerId) -> str:
        """Hand on."""
        return self._agent.route(peer)

    def set_active(self, active: bool) -> None:
        """Hand on."""
        self._agent.set_active(active)

    def wakeup_fd(self) -> int | None:
        """Hand on."""
        return self._agent.wakeup_fd()

    def fence(self, peer: PeerId) -> Fence:
        """Hand on."""
        return self._agent.fence(peer)

    def close(self) -> None:
        """Hand on."""
        self._agent.close()

    def take_figures(self) -> dict[str, float]:
        """``posting`` and ``wire`` (first post to last completion), in seconds, since the last call."""
        wire = max(0.0, self._last_completion - self._first_post) if self._first_post is not None else 0.0
        figures = {"posting": self._posting, "wire": wire}
        self._posting, self._first_post = 0.0, None
        return figures

    @contextmanager
    def _posting_timed(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._posting += time.monotonic() - begun
        if self._first_post is None:
            self._first_post = begun


class TimedBlockAgent(TimedAgent, BlockTransferAgent):
    """The same for an agent that takes block lists; planning is part of its wire's time."""

    def __init__(self, agent: BlockTransferAgent) -> None:
        super().__init__(agent)
        self._block_agent = agent

    def block_map(self, copy: PoolCopy) -> object:
        """Hand on."""
        return self._block_agent.block_map(copy)

    def submit_blocks(self, peer: PeerId, block_map: object, src: BlockIds, dst: BlockIds) -> TransferId:
        """Hand on, and keep the time."""
        with self._posting_timed():
            return self._block_agent.submit_blocks(peer, block_map, src, dst)

    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> bool:
        """Hand on."""
        return self._block_agent.cancel(transfer, reason)

    def progress_bytes(self, transfer: TransferId) -> int | None:
        """Hand on."""
        return self._block_agent.progress_bytes(transfer)
