"""The messages of the control channel: typed, versioned, msgpack; never pickle.

Block ids cross the wire, never addresses of single blocks; a pool's base address crosses once, in the handshake.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvferry_plugins.layout import LayerKind

PROTOCOL = (2, 2)
"""Oldest and newest protocol version that this side speaks."""

MAX_MESSAGE_BYTES = 8 << 20
"""The socket cuts a longer message and drops its sender: a table of 1,000,000 blocks fits."""

MAX_AUX_BYTES = 64 << 10
"""Of what an engine sends along with its request's KV."""

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
MAX_REASON_CHARACTERS = 4000
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]


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
    tokens_per_block: Positive
    kv_heads: Positive
    head_dim: Count
    window: Positive | None
    kind: LayerKind
    head_start: Count
    total_heads: Count


class WireLayout(Struct, frozen=True, array_like=True):
    """``layout.KvLayout`` on the wire."""

    dtype: Name
    groups: list[WireGroup]
    pools: list[WirePool]


class WireMember(Struct, frozen=True, array_like=True):
    """``world.Member`` on the wire: one rank of an instance."""

    rank: Count
    endpoint: Name
    instance: Name
    incarnation: Count
    layout: WireLayout


class Subject(Struct, frozen=True, array_like=True):
    """Which request the ranks of an instance agree about: alike on all of them."""

    role: Name
    request: Count
    """The engine's own id."""
    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Tells one use of an id, or one attempt, from the next."""


class Hello(Message, frozen=True, tag="HELLO", omit_defaults=True):
    """The handshake. The first exchange carries fingerprints; only who passed sends memory and descriptor."""

    protocol: tuple[Count, Count]
    instance: Name
    incarnation: Count
    role: Name
    reply: bool
    fingerprint: dict[str, Any] = {}
    descriptor: bytes | None = None
    layout: WireLayout | None = None
    rank: Count = 0
    """Which rank of its instance the sender is."""
    world: list[WireMember] = []
    """All ranks of its instance, where it has several; with the memory."""


class Refuse(Message, frozen=True, tag="REFUSE", omit_defaults=True):
    """No: to a handshake (``key`` is None) or to one TABLE. ``field`` is what is to blame."""

    field: Name
    reason: Reason
    key: Key | None = None
    fields: dict[str, tuple[Any, Any]] = {}
    gone: bool = False
    """The request is over here, or was never: another TABLE for it would hear the same."""


class Table(Message, frozen=True, tag="TABLE"):
    """Generation: these are my blocks for the prompt's tokens from ``start_tokens`` on, −1 where I want none."""

    key: Key
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    prompt_digest: Annotated[bytes, Meta(min_length=16, max_length=16)]
    prompt_tokens: Count
    start_tokens: Count
    blocks: list[bytes]
    """int32 little-endian block ids, one array a layer group of mine."""
    nbytes: Count
    """What I expect."""
    may_precede_request: bool = False
    """Generation-first: the context worker may not have heard of the request yet, and holds the table."""
    ranks: Positive = 1
    """How many ranks of mine ask you, each with a TABLE of its own."""


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


class Cancel(Message, frozen=True, tag="CANCEL", omit_defaults=True):
    """Generation: stop; tell me CANCELLED when nothing is posted any more. Context: the request is gone."""

    key: Key
    reason: Reason = ""
    """Context: why, where its engine said so."""
    failed: bool = False
    """Generation: nobody cancelled; the request has failed elsewhere."""


class Cancelled(Message, frozen=True, tag="CANCELLED", omit_defaults=True):
    """Context: nothing is posted to your blocks, and nothing will be."""

    key: Key
    reason: Reason = ""
    """Why, where its engine said so."""


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


class Join(Message, frozen=True, tag="JOIN"):
    """A rank to rank 0 of its instance: I am here."""

    protocol: tuple[Count, Count]
    role: Name
    topology: tuple[Count, Count, Count]
    """Tensor, pipeline and data parallel size."""
    data_rank: Count
    member: WireMember
    fingerprint: dict[str, Any]


class Gathered(Message, frozen=True, tag="WORLD"):
    """Rank 0 to each rank: who is here. With nobody missing it is the world, and the instance begins."""

    missing: list[Count]
    members: list[WireMember] = []
    secret: Annotated[bytes, Meta(max_length=64)] = b""
    """Of the instance, from which every rank derives a request's token."""


class Lost(Message, frozen=True, tag="LOST"):
    """A rank of this instance is gone, or is leaving: what is in flight has failed on all."""

    rank: Count
    reason: Reason


class Ended(Message, frozen=True, tag="ENDED"):
    """A rank to rank 0: how a request ended here; ``absent`` = it was told to stop, and never had it."""

    subject: Subject
    outcome: Name
    reason: Reason = ""


class Verdict(Message, frozen=True, tag="VERDICT"):
    """Rank 0 to each rank: how a request ended; until it is ``final``: end it so where it still runs."""

    subject: Subject
    outcome: Name
    rank: Count = 0
    """Whose end decided."""
    reason: Reason = ""
    final: bool = True


AnyMessage = (
    Hello
    | Refuse
    | Table
    | Posting
    | ChunkDone
    | Done
    | Cancel
    | Cancelled
    | Failed
    | Ping
    | Join
    | Gathered
    | Lost
    | Ended
    | Verdict
)

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
