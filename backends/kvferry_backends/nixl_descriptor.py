"""What one NIXL agent tells another before they can meet."""

import zlib

import msgspec

from kvferry_backends.process_identity import ProcessIdentity
from kvferry_plugins.errors import TransferError

MAX_BYTES = 1 << 20
_FORMAT = "kvferry-nixl/1"


class NixlDescriptor(msgspec.Struct, frozen=True):
    """NIXL's own metadata, with what NIXL does not say: which process it is, and what memory it has."""

    name: str
    """NIXL's name of the agent, unique in time and space."""
    device: str
    """Where the agent's registered memory is: ``cpu`` or ``cuda:N``."""
    library: str
    process: ProcessIdentity
    metadata: bytes
    checksum: int = 0
    """CRC-32 of ``metadata``: NIXL's own parser is not asked to survive a damaged one."""
    format: str = _FORMAT


def encode(descriptor: NixlDescriptor) -> bytes:
    """Pack a descriptor, with its checksum."""
    sealed = msgspec.structs.replace(descriptor, checksum=zlib.crc32(descriptor.metadata))
    return msgspec.msgpack.encode(sealed)


def decode(body: bytes) -> NixlDescriptor:
    """Unpack a descriptor. Raises TransferError for anything that ``encode`` did not make."""
    if len(body) > MAX_BYTES:
        raise TransferError(f"a NIXL descriptor of {len(body)} bytes is longer than the {MAX_BYTES} allowed")
    try:
        descriptor = msgspec.msgpack.decode(body, type=NixlDescriptor)
    except msgspec.DecodeError as error:
        raise TransferError(f"{body[:32]!r} is not the descriptor of a NIXL agent: {error}") from error
    if descriptor.format != _FORMAT:
        raise TransferError(f"the peer's NIXL descriptor is {descriptor.format!r}; this kvferry reads {_FORMAT!r}")
    if descriptor.checksum != zlib.crc32(descriptor.metadata):
        raise TransferError(f"the NIXL descriptor of {descriptor.name!r} was damaged on its way")
    return descriptor
