from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transceiver.params import (
    STATE_VERSION,
    OpaqueState,
    pack_state,
    prompt_digest,
    read_source,
    unpack_state,
    with_sampler,
)
from kvferry_plugins.errors import TransferError
from kvferry_plugins.types import DisaggregatedParams

PROMPT = (1, 2, 3)


def state(**changes):
    values = {"version": STATE_VERSION, "instance": "i", "incarnation": 1, "request": 7, "token": b"t" * 16}
    return OpaqueState(**{**values, "prompt_digest": prompt_digest(PROMPT), **changes})


def params(opaque=None, **changes):
    packed = pack_state(state()) if opaque is None else opaque
    whole = DisaggregatedParams(
        "generation_only", ctx_request_id=7, opaque_state=packed, ctx_info_endpoint="tcp://127.0.0.1:1"
    )
    return replace(whole, **changes)


def test_good_parameters_name_the_source():
    source = read_source(params(), PROMPT)
    assert (source.endpoint, source.state) == ("tcp://127.0.0.1:1", state())


@pytest.mark.parametrize(
    ("given_params", "field"),
    [
        (None, "disaggregated_params"),
        (params(request_type="context_only"), "request_type"),
        (params(request_type="context_and_generation"), "request_type"),
        (params(ctx_info_endpoint=None), "ctx_info_endpoint"),
        (params(ctx_info_endpoint=""), "ctx_info_endpoint"),
        (params(opaque_state=None), "opaque_state"),
        (params(b""), "opaque_state"),
        (params(b"junk"), "opaque_state"),
        (params("text"), "opaque_state"),
        (params(pack_state(state())[:-1]), "opaque_state"),
        (params(pack_state(state()) + b"\x00"), "opaque_state"),
        (params(pack_state(state(version=STATE_VERSION + 1))), "opaque_state"),
        (params(pack_state(state(token=b"short"))), "opaque_state"),
        (params(ctx_request_id=8), "ctx_request_id"),
        (params(ctx_request_id=None), "ctx_request_id"),
        (params(pack_state(state(prompt_digest=b"p" * 16))), "prompt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_parameter_to_blame_is_named(given_params, field):
    with pytest.raises(TransferError) as caught:
        read_source(given_params, PROMPT)
    assert caught.value.field == field


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_are_refused_as_a_transfer_error(junk):
    with pytest.raises(TransferError):
        unpack_state(junk)


@settings(deadline=None)
@given(st.lists(st.integers(0, 1 << 20), max_size=20), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_equal_prompts_and_no_others_have_equal_digests(one, other):
    assert (prompt_digest(one) == prompt_digest(other)) == (one == other)


def test_the_samplers_state_travels_with_the_rest_unchanged():
    sampled = with_sampler(params(), 42, 3)
    unpacked = unpack_state(sampled.opaque_state)
    assert (unpacked.seed, unpacked.counter) == (42, 3)
    assert msgspec.structs.replace(unpacked, seed=None, counter=0) == state()
    assert read_source(sampled, PROMPT).state == unpacked
