"""The messages of the control channel: typed, versioned, msgpack; never pickle.

Block ids cross the wire, never addresses of single blocks; a pool's base address crosses once, in the handshake.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

PROTOCOL = (1, 1)
"""Oldest and newest protocol version that this side speaks."""

MAX_MESSAGE_BYTES = 8 << 20
"""The socket cuts a longer message and drops its sender: a table of 1,000,000 blocks fits."""

MAX_AUX_BYTES = 64 << 10
"""Of what an engine sends along with its request's KV."""

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Reason = Annotated[str, Meta(max_length=4000)]


class MalformedMessageError(ValueError):
    """Bytes that are no message of this protocol."""


class Key(Struct, frozen=True, array_like=True):
    """Which hand-off a message is about: the context worker's instance and life, its request, and the attempt."""

    instance: Name
    incarnation: Count
    request: Count
    attempt: Count

    def __str__(self) -> str:
        return f"request {self.request} (attempt {self.attempt}) of {self.instance[:8]}"


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class WireView(Struct, frozen=True, array_like=True):
    """``layout.RoleView`` on the wire."""

    layer: Count
    role: Name
    offset: Count
    heads: Count
    head_stride: Count
    tokens: Count
    token_stride: Count
    row_bytes: Count


class WirePool(Struct, frozen=True, array_like=True):
    """``layout.Pool`` on the wire."""

    base: Count
    block_stride: Count
    num_blocks: Count
    views: list[WireView]
    device: Name


class WireGroup(Struct, frozen=True, array_like=True):
    """``layout.LayerGroup`` on the wire."""

    layers: list[Count]
    pools: list[Count]
    tokens_per_block: Count
    kv_heads: Count
    head_dim: Count
    window: Count | None


class WireLayout(Struct, frozen=True, array_like=True):
    """``layout.KvLayout`` on the wire."""

    dtype: Name
    groups: list[WireGroup]
    pools: list[WirePool]


class Hello(Message, frozen=True, tag="HELLO"):
    """The handshake. The first exchange carries fingerprints; only who passed sends memory and descriptor."""

    protocol: tuple[Count, Count]
    instance: Name
    incarnation: Count
    role: Name
    reply: bool
    fingerprint: dict[str, Any] = {}
    descriptor: bytes | None = None
    layout: WireLayout | None = None


class Refuse(Message, frozen=True, tag="REFUSE", omit_defaults=True):
    """No: to a handshake (``key`` is None) or to one TABLE. ``field`` is what is to blame."""

    field: Name
    reason: Reason
    key: Key | None = None
    fields: dict[str, tuple[Any, Any]] = {}
    gone: bool = False
    """The request is over here, or was never: another TABLE for it would hear the same."""


class Table(Message, frozen=True, tag="TABLE"):
    """Generation: these are my blocks for the prompt's tokens from ``start_tokens`` on."""

    key: Key
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    prompt_digest: Annotated[bytes, Meta(min_length=16, max_length=16)]
    prompt_tokens: Count
    start_tokens: Count
    blocks: list[bytes]
    """int32 little-endian block ids, one array a group."""
    nbytes: Count
    """What I expect."""
    may_precede_request: bool = False
    """Generation-first: the context worker may not have heard of the request yet, and holds the table."""


class Posting(Message, frozen=True, tag="POSTING"):
    """Context: writes start now; make progress. The transfer clock runs from here."""

    key: Key
    nbytes: Count


class ChunkDone(Message, frozen=True, tag="CHUNK_DONE"):
    """Context: so many bytes in all are complete at your side."""

    key: Key
    nbytes: Count


class Done(Message, frozen=True, tag="DONE", omit_defaults=True):
    """Context: every byte is complete at your side. Sent back by generation, without ``aux``, it acknowledges."""

    key: Key
    nbytes: Count
    blocks: Count
    checksum: Count | None = None
    aux: Annotated[bytes, Meta(max_length=MAX_AUX_BYTES)] = b""
    """What the context worker's engine tells the generation worker's."""


def without_aux(done: Done) -> Done:
    """The same DONE for somebody who has its ``aux``."""
    return msgspec.structs.replace(done, aux=b"") if done.aux else done


class Cancel(Message, frozen=True, tag="CANCEL"):
    """Generation: stop; tell me CANCELLED when nothing is posted any more. Context: the request is gone."""

    key: Key


class Cancelled(Message, frozen=True, tag="CANCELLED"):
    """Context: nothing is posted to your blocks, and nothing will be."""

    key: Key


class Failed(Message, frozen=True, tag="FAILED"):
    """The hand-off failed here. ``posted``: a write may still be in flight; CANCELLED follows when none is."""

    key: Key
    reason: Reason
    posted: bool = False


class Ping(Message, frozen=True, tag="PING"):
    """I am alive; ``reply`` marks the answer."""

    instance: Name
    incarnation: Count
    reply: bool = False


AnyMessage = Hello | Refuse | Table | Posting | ChunkDone | Done | Cancel | Cancelled | Failed | Ping

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Turn a message into the one frame that carries it."""
    return _encoder.encode(message)


def decode(frame: bytes) -> AnyMessage:
    """Read one frame. Raises MalformedMessageError for anything that is not exactly one message of ours."""
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessageError(str(error)) from error
