"""What a hand-off's parameters carry: the token, the key, and the sampler's state, opaque to any router."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvferry.transceiver.wire import Count, Name
from kvferry_plugins.errors import TransferError
from kvferry_plugins.types import DisaggregatedParams

STATE_VERSION = 1


class OpaqueState(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``DisaggregatedParams.opaque_state``, unpacked."""

    version: Count
    instance: Name
    incarnation: Count
    request: Count
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    prompt_digest: Annotated[bytes, Meta(min_length=16, max_length=16)]
    seed: int | None = None
    counter: Count = 0


@dataclass(frozen=True, slots=True)
class HandoffSource:
    """Where a generation worker fetches a request from, checked as far as it can be without asking."""

    endpoint: str
    state: OpaqueState


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """16 bytes that tell one prompt from another."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i8").tobytes(), digest_size=16).digest()


def pack_state(state: OpaqueState) -> bytes:
    """Pack the state for ``opaque_state``."""
    return msgspec.msgpack.encode(state)


def unpack_state(opaque_state: bytes | None) -> OpaqueState:
    """Read ``opaque_state``. Raises TransferError with ``field='opaque_state'``."""
    if not opaque_state:
        raise TransferError("opaque_state is missing: pass on what the context worker answered", field="opaque_state")
    try:
        state = msgspec.msgpack.decode(opaque_state, type=OpaqueState)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise TransferError(
            f"opaque_state cannot be read ({error}): pass on what the context worker answered, unchanged",
            field="opaque_state",
        ) from error
    if state.version != STATE_VERSION:
        raise TransferError(
            f"opaque_state has version {state.version}, this worker reads {STATE_VERSION}: "
            "run the same kvferry on both sides",
            field="opaque_state",
        )
    return state


def with_sampler(params: DisaggregatedParams, seed: int | None, counter: int) -> DisaggregatedParams:
    """Add the sampler's state, so that the generation worker draws the next token of the same sequence."""
    state = unpack_state(params.opaque_state)
    return replace(params, opaque_state=pack_state(msgspec.structs.replace(state, seed=seed, counter=counter)))


def read_source(params: DisaggregatedParams | None, token_ids: Sequence[int]) -> HandoffSource:
    """Check the parameters of a generation request against themselves and its prompt.

    Raises:
        TransferError: with ``field`` naming the parameter that is missing, malformed or another request's.
    """
    if params is None:
        raise TransferError("a generation request needs disaggregated_params", field="disaggregated_params")
    if params.request_type != "generation_only":
        raise TransferError(
            f"request_type is {params.request_type!r}: a generation worker takes 'generation_only'",
            field="request_type",
        )
    if not params.ctx_info_endpoint:
        raise TransferError("ctx_info_endpoint is missing", field="ctx_info_endpoint")
    state = unpack_state(params.opaque_state)
    if params.ctx_request_id != state.request:
        raise TransferError(
            f"ctx_request_id is {params.ctx_request_id}, but opaque_state belongs to request {state.request}",
            field="ctx_request_id",
        )
    if prompt_digest(token_ids) != state.prompt_digest:
        raise TransferError(
            f"the prompt ({len(token_ids)} tokens) is not the one that request {state.request} prefilled",
            field="prompt",
        )
    return HandoffSource(endpoint=params.ctx_info_endpoint, state=state)
