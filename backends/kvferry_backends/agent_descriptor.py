"""What one agent of ours tells another before they can meet: the same for both runtimes, so that they can be mixed."""

import zlib
from typing import Annotated

import msgspec

from kvferry_backends.process_identity import ProcessIdentity
from kvferry_plugins.errors import TransferError

MAX_BYTES = 1 << 20
_FORMAT = "kvferry-agent/1"
_CHECKSUM_BYTES = 4

_Natural = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Small = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]

RegionRow = tuple[_Natural, _Natural, _Small, _Small]
"""Address, bytes, kind of memory (0 = CPU, 1 = CUDA), number of the device."""

BackingRow = tuple[_Small, _Natural, _Natural, _Natural]
"""The file behind a region: descriptor in its owner's process, device, inode, offset."""


class AgentDescriptor(msgspec.Struct, frozen=True):
    """The transport's own metadata, with what it does not say: which process it is, and what memory it has."""

    name: str
    """Unique in time and space."""
    transport: str
    """Lower case: ``nixl``, ``ucx``, …"""
    device: str
    """Where the agent's registered memory is: ``cpu`` or ``cuda:N``."""
    library: str
    process: ProcessIdentity
    key: bytes
    """16 random bytes: an agent with lanes has one name for all of them."""
    regions: tuple[RegionRow, ...]
    """Registered memory."""
    lanes: tuple[bytes, ...]
    """The transport's metadata, one a lane; a peer without lanes takes the first."""
    backings: tuple[BackingRow | None, ...] = ()
    """By region, where it can be mapped by a process of the same host; empty: none can."""
    format: str = _FORMAT


def encode(descriptor: AgentDescriptor) -> bytes:
    """Pack a descriptor, with its checksum. Raises TransferError if it is longer than the contract allows."""
    packed = msgspec.msgpack.encode(descriptor)
    body = packed + _checksum(packed)
    if len(body) > MAX_BYTES:
        raise TransferError(f"{descriptor.name} has a descriptor of {len(body)} bytes: register fewer, larger regions")
    return body


def decode(body: bytes, transport: str) -> AgentDescriptor:
    """Unpack a peer's descriptor. Raises TransferError for another transport's, or what ``encode`` did not make."""
    if len(body) > MAX_BYTES:
        raise TransferError(f"a descriptor of {len(body)} bytes is longer than the {MAX_BYTES} allowed")
    packed, checksum = body[:-_CHECKSUM_BYTES], body[-_CHECKSUM_BYTES:]
    if checksum != _checksum(packed):
        raise TransferError(f"{body[:32]!r} is not the descriptor of an agent, or was damaged on its way")
    try:
        descriptor = msgspec.msgpack.decode(packed, type=AgentDescriptor)
    except msgspec.DecodeError as error:
        raise TransferError(f"{body[:32]!r} is not the descriptor of an agent: {error}") from error
    if descriptor.format != _FORMAT:
        raise TransferError(f"the peer's descriptor is {descriptor.format!r}; this kvferry reads {_FORMAT!r}")
    if descriptor.transport != transport:
        raise TransferError(f"{descriptor.name} speaks {descriptor.transport}, this agent speaks {transport}")
    if not descriptor.lanes or len(descriptor.key) != 16:
        raise TransferError(f"the descriptor of {descriptor.name!r} lacks its lanes or its key")
    if len(descriptor.backings) not in (0, len(descriptor.regions)):
        raise TransferError(
            f"the descriptor of {descriptor.name!r} has {len(descriptor.regions)} regions, "
            f"but says of {len(descriptor.backings)} where they lie"
        )
    return descriptor


def memory_kind(device: str) -> tuple[int, int]:
    """Kind and number of a device, as in a ``RegionRow``."""
    kind, _, number = device.partition(":")
    return (0, 0) if kind == "cpu" else (1, int(number or 0))


def _checksum(packed: bytes) -> bytes:
    """CRC-32: transports' own parsers are not asked to survive a damaged descriptor."""
    return zlib.crc32(packed).to_bytes(_CHECKSUM_BYTES, "little")
