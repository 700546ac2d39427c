"""What a context worker's engine sends along with the last bytes of a prompt: what decoding goes on from."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvferry_plugins.errors import TransferError

VERSION = 1

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class FirstToken(Struct, frozen=True, array_like=True):
    """``TransferRequest.aux``, unpacked; a later version adds fields at the end."""

    version: Count
    token: Count
    sampled: Count
    """Tokens sampled so far: the counter that goes with the seed."""
    ended: bool
    """Whether the token ended the output."""


def pack_first_token(token: int, *, sampled: int, ended: bool) -> bytes:
    """Pack for ``TransferRequest.aux``."""
    return msgspec.msgpack.encode(FirstToken(VERSION, token, sampled, ended))


def unpack_first_token(aux: bytes) -> FirstToken:
    """Read ``TransferEvent.aux``.

    Raises:
        TransferError: it is not there, or cannot be read.
    """
    if not aux:
        raise TransferError("the context worker sent no first token along: run the same kvferry on both sides")
    try:
        first = msgspec.msgpack.decode(aux, type=FirstToken)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(
            f"what the context worker sent along cannot be read ({error}): run the same kvferry on both sides"
        ) from error
    if first.sampled != 1:
        raise TransferError(f"the context worker sampled {first.sampled} tokens, this worker goes on from 1")
    return first
