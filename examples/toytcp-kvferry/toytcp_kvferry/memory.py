"""The registered memory: the only way to an address, so that nothing outside of it is ever read or written."""

import ctypes
from collections.abc import Sequence

from kvferry_plugins.errors import TransferError
from kvferry_plugins.transceiver import Region, RegistrationId


class Memory:
    """Regions by registration."""

    def __init__(self) -> None:
        self._views: dict[RegistrationId, list[tuple[int, memoryview]]] = {}

    def add(self, registration: RegistrationId, regions: Sequence[Region]) -> None:
        """Register regions. Raises TransferError for memory that a socket cannot reach."""
        for region in regions:
            if region.device != "cpu":
                raise TransferError(f"TOYTCP serves memory on cpu, not on {region.device}: set device to cpu")
        self._views[registration] = [(region.address, _view(region)) for region in regions]

    def remove(self, registration: RegistrationId) -> None:
        """Forget regions; what is still to come for them is refused."""
        self._views.pop(registration, None)

    def find(self, address: int, nbytes: int) -> memoryview:
        """These bytes. Raises TransferError unless they lie within one registered region."""
        for base, view in (each for views in self._views.values() for each in views):
            offset = address - base
            if offset >= 0 and 0 <= nbytes <= len(view) - offset:
                return view[offset : offset + nbytes]
        raise TransferError(f"{nbytes} bytes at {address:#x} are not registered")


class Landing:
    """Where one transfer's bytes go: to registered memory, or, from the first bad address on, nowhere."""

    def __init__(self, memory: Memory, segments: Sequence[Sequence[int]]) -> None:
        self._memory = memory
        self._nowhere = memoryview(bytearray(1 << 16))
        self.refusal = ""
        for address, nbytes in segments:
            self.room(address, nbytes)

    def room(self, address: int, nbytes: int) -> memoryview:
        """Where to read these bytes to. Asked each time: a registration may end while bytes are on their way."""
        try:
            if not self.refusal:
                return self._memory.find(address, nbytes)
        except TransferError as error:
            self.refusal = f"the target refuses: {error}"
        return self._nowhere[:nbytes]


def _view(region: Region) -> memoryview:
    return memoryview((ctypes.c_ubyte * region.nbytes).from_address(region.address)).cast("B")
