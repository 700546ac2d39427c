"""NIXL's part of a descriptor, as the native transport packs it: NIXL's own metadata, then the registered regions."""

import struct
from collections.abc import Sequence

from kvferry_backends.agent_descriptor import RegionRow
from kvferry_plugins.errors import TransferError

_LENGTH = struct.Struct("<I")
_REGION = struct.Struct("<QQii")


def pack_lane(metadata: bytes, regions: Sequence[RegionRow]) -> bytes:
    """Pack what another agent, of either runtime, needs to load this one."""
    rows = b"".join(_REGION.pack(*region) for region in regions)
    return _LENGTH.pack(len(metadata)) + metadata + _LENGTH.pack(len(regions)) + rows


def unpack_metadata(lane: bytes) -> bytes:
    """Return NIXL's own metadata. Raises TransferError for what ``pack_lane`` did not make."""
    try:
        (nbytes,) = _LENGTH.unpack_from(lane)
        (regions,) = _LENGTH.unpack_from(lane, _LENGTH.size + nbytes)
    except struct.error as error:
        raise TransferError(f"NIXL's part of the descriptor is cut short: {error}") from error
    if len(lane) != 2 * _LENGTH.size + nbytes + regions * _REGION.size:
        raise TransferError(f"NIXL's part of the descriptor has {len(lane)} bytes, more or less than it says")
    return lane[_LENGTH.size : _LENGTH.size + nbytes]
