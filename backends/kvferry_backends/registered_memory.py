"""Which addresses a transfer may name: those that its two ends have registered."""

from collections.abc import Iterable

import numpy as np

from kvferry_plugins.errors import TransferError
from kvferry_plugins.layout import Addresses


class RegisteredMemory:
    """Regions of one agent, none of which overlaps another.

    Args:
        regions: (address, bytes).
        owner: for messages: ``"this agent"``, or a peer's name.
    """

    def __init__(self, regions: Iterable[tuple[int, int]], owner: str) -> None:
        self._owner = owner
        rows = np.array(sorted(regions), dtype=np.int64).reshape(-1, 2)
        self._starts = rows[:, 0]
        self._ends = rows.sum(axis=1)

    def require(self, addresses: Addresses, nbytes: Addresses) -> None:
        """Raise TransferError for the first segment, both int64[n], that does not lie within one region."""
        if not len(addresses):
            return
        region = np.searchsorted(self._starts, addresses, side="right") - 1
        inside = region >= 0
        inside[inside] = (addresses + nbytes)[inside] <= self._ends[region[inside]]
        if not inside.all():
            first = int(np.argmin(inside))
            raise TransferError(
                f"{int(nbytes[first])} bytes at {int(addresses[first]):#x} are not registered by {self._owner}, "
                f"which has {len(self._starts)} regions"
            )
