"""A transfer agent that hands everything on to another, and keeps the time of posting and of the wire."""

import time
from collections.abc import Sequence

from kvferry_plugins.layout import Addresses
from kvferry_plugins.transceiver import (
    Completion,
    Fence,
    PeerId,
    Region,
    RegistrationId,
    TransferAgent,
    TransferId,
)


class TimedAgent(TransferAgent):
    """Wraps ``agent``; ``take_figures`` gives the seconds since it was last asked."""

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self.library = agent.library
        self._posting = 0.0
        self._first_post: float | None = None
        self._last_completion = 0.0

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
        begun = time.monotonic()
        transfer = self._agent.submit(peer, src, dst, nbytes)
        self._posting += time.monotonic() - begun
        if self._first_post is None:
            self._first_post = begun
        return transfer

    def poll(self) -> list[Completion]:
        """Hand on, and keep the time of completions."""
        completions = self._agent.poll()
        if completions:
            self._last_completion = time.monotonic()
        return completions

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
