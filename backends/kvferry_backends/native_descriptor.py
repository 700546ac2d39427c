"""What one native agent tells another before they can meet."""

import zlib

import msgspec

from kvferry_backends.process_identity import ProcessIdentity
from kvferry_plugins.errors import TransferError

MAX_BYTES = 1 << 20
_FORMAT = "kvferry-native/1"


class NativeDescriptor(msgspec.Struct, frozen=True):
    """The engine's own part, with what it does not know: which process it is, and of what library."""

    name: str
    transport: str
    device: str
    """Where the agent's registered memory is: ``cpu`` or ``cuda:N``."""
    library: str
    process: ProcessIdentity
    body: bytes
    """What ``Engine.descriptor`` gave."""
    checksum: int = 0
    """CRC-32 of ``body``: transports' own parsers are not asked to survive a damaged one."""
    format: str = _FORMAT


def encode(descriptor: NativeDescriptor) -> bytes:
    """Pack a descriptor, with its checksum."""
    return msgspec.msgpack.encode(msgspec.structs.replace(descriptor, checksum=zlib.crc32(descriptor.body)))


def decode(body: bytes) -> NativeDescriptor:
    """Unpack a descriptor. Raises TransferError for anything that ``encode`` did not make."""
    if len(body) > MAX_BYTES:
        raise TransferError(f"a descriptor of {len(body)} bytes is longer than the {MAX_BYTES} allowed")
    try:
        descriptor = msgspec.msgpack.decode(body, type=NativeDescriptor)
    except msgspec.DecodeError as error:
        raise TransferError(f"{body[:32]!r} is not the descriptor of a native agent: {error}") from error
    if descriptor.format != _FORMAT:
        raise TransferError(f"the peer's descriptor is {descriptor.format!r}; this kvferry reads {_FORMAT!r}")
    if descriptor.checksum != zlib.crc32(descriptor.body):
        raise TransferError(f"the descriptor of {descriptor.name!r} was damaged on its way")
    return descriptor
