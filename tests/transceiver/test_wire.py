import contextlib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.transceiver import wire
from kvferry.transceiver.mapping import GeometryError, share
from kvferry.transceiver.wire import MalformedMessageError, decode, encode
from kvferry.transceiver.wire_layout import MAX_ROWS, from_wire, to_wire
from kvferry_plugins.layout import KvLayout, LayerGroup, dense_pool

counts = st.integers(0, (1 << 62) - 1)
names = st.text(min_size=1, max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
keys = st.builds(wire.Key, names, counts, counts, counts)
digests = st.binary(min_size=16, max_size=16)
views = st.builds(wire.WireView, counts, names, *[counts] * 6)
pools = st.builds(wire.WirePool, counts, counts, counts, st.lists(views, max_size=2), names)
positives = counts.filter(bool)
groups = st.builds(
    wire.WireGroup,
    st.lists(counts, max_size=3),
    st.lists(counts, max_size=2),
    positives,
    positives,
    counts,
    st.none() | positives,
    st.sampled_from(("attention", "latent", "state")),
    counts,
    counts,
)
layouts = st.builds(wire.WireLayout, names, st.lists(groups, max_size=2), st.lists(pools, max_size=2))
messages = st.one_of(
    st.builds(
        wire.Hello,
        protocol=st.tuples(counts, counts),
        instance=names,
        incarnation=counts,
        role=names,
        reply=st.booleans(),
        fingerprint=st.dictionaries(names, plain, max_size=3),
        descriptor=st.none() | st.binary(max_size=20),
        layout=st.none() | layouts,
    ),
    st.builds(wire.Refuse, field=names, reason=st.text(max_size=20), key=st.none() | keys),
    st.builds(
        wire.Table,
        key=keys,
        token=digests,
        prompt_digest=digests,
        prompt_tokens=counts,
        start_tokens=counts,
        blocks=st.lists(st.binary(max_size=16), max_size=2),
        nbytes=counts,
        may_precede_request=st.booleans(),
    ),
    st.builds(wire.Posting, key=keys, nbytes=counts),
    st.builds(wire.ChunkDone, key=keys, nbytes=counts),
    st.builds(wire.Done, key=keys, nbytes=counts, blocks=counts, checksum=st.none() | counts),
    st.builds(wire.Cancel, key=keys),
    st.builds(wire.Cancelled, key=keys),
    st.builds(wire.Failed, key=keys, reason=st.text(max_size=20), posted=st.booleans()),
    st.builds(wire.Ping, instance=names, incarnation=counts, reply=st.booleans()),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages)
def test_every_message_arrives_as_it_was_sent(message):
    assert decode(encode(message)) == message


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_random_bytes_are_malformed(frame):
    with pytest.raises(MalformedMessageError):
        decode(frame)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages, st.data())
def test_a_frame_that_is_cut_short_or_too_long_is_malformed(message, data):
    frame = encode(message)
    cut = data.draw(st.integers(0, len(frame) - 1))
    for broken in (frame[:cut], frame + b"\x00", frame + frame):
        with pytest.raises(MalformedMessageError):
            decode(broken)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_mutated_frame_is_a_message_or_malformed_and_nothing_else(message, edits):
    frame = bytearray(encode(message))
    for position, value in edits:
        frame[position % len(frame)] = value
    try:
        assert isinstance(decode(bytes(frame)), wire.AnyMessage)
    except MalformedMessageError:
        return


def plain_key():
    return ["i", 1, 2, 3]


@pytest.mark.parametrize(
    "body",
    [
        {"type": "CANCEL", "key": plain_key(), "surprise": 1},
        {"type": "CANCEL", "key": [*plain_key(), 5, 6][:3]},
        {"type": "CANCEL", "key": ["", 1, 2, 3]},
        {"type": "CANCEL", "key": ["i", -1, 2, 3]},
        {"type": "CANCEL", "key": ["i", 1, 1 << 62, 3]},
        {"type": "CANCEL"},
        {"type": "SHUTDOWN", "key": plain_key()},
        {"type": 7},
        {"key": plain_key()},
        {"type": "CHUNK_DONE", "key": plain_key(), "nbytes": 1.5},
        {"type": "CHUNK_DONE", "key": plain_key(), "nbytes": "1"},
        ["CANCEL", plain_key()],
        None,
    ],
    ids=str,
)
def test_unknown_fields_tags_types_and_ranges_are_malformed(body):
    with pytest.raises(MalformedMessageError):
        decode(msgspec.msgpack.encode(body))


def test_nesting_without_end_is_malformed():
    frame = encode(wire.Hello((1, 1), "i", 1, "context", False, fingerprint={"x": "y"}))
    with pytest.raises(MalformedMessageError):
        decode(frame.replace(b"\xa1y", b"\x91" * 100_000 + b"\xc0"))


def test_a_table_of_a_million_blocks_fits_into_one_message():
    table = wire.Table(wire.Key("i" * 32, 1, 2, 3), b"t" * 16, b"p" * 16, 4 << 20, 0, [bytes(4 << 20)], 1 << 40)
    assert len(encode(table)) < wire.MAX_MESSAGE_BYTES


# --- layouts ---------------------------------------------------------------------------------------------------------


def small_layout(**pool):
    layers = (0, 1)
    described = dense_pool(
        layers=layers, kv_heads=2, head_dim=4, tokens_per_block=4, item_bytes=2, num_blocks=8, base=4096, **pool
    )
    return KvLayout("float16", (LayerGroup(layers, (0,), 4, 2, 4),), (described,))


def test_a_layout_survives_the_wire():
    assert from_wire(to_wire(small_layout())) == small_layout()


@given(layouts)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_strangers_layout_is_read_or_malformed(layout):
    try:
        read = from_wire(layout)
        _ = [pool.runs for pool in read.pools]
    except MalformedMessageError:
        return


@given(layouts, st.booleans())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_strangers_layout_is_mapped_or_refused(layout, is_source):
    ends = small_layout(), from_wire_or_none(layout)
    if ends[1] is None:
        return
    with contextlib.suppress(GeometryError):
        share(*([end] for end in (ends if not is_source else ends[::-1])))


def from_wire_or_none(layout):
    try:
        return from_wire(layout)
    except MalformedMessageError:
        return None


@pytest.mark.parametrize("is_source", [False, True])
@pytest.mark.parametrize(
    ("changes", "group", "field"),
    [
        ({"heads": MAX_ROWS // 16, "head_stride": 0, "token_stride": 0, "row_bytes": 8}, {}, "kv_heads"),
        ({}, {"head_start": 1 << 50}, "kv_heads"),
        ({}, {"total_heads": 1 << 50}, "kv_heads"),
        ({}, {"tokens_per_block": 1 << 40}, "tokens_per_block"),
        ({"tokens": 1}, {}, "tokens_per_block"),
        ({"row_bytes": 4}, {}, "roles"),
        ({"role": "latent"}, {}, "layers"),
    ],
    ids=str,
)
def test_a_layout_that_makes_no_sense_beside_ours_is_refused(changes, group, field, is_source):
    wire_layout = change(small_layout(), **changes)
    groups = [msgspec.structs.replace(wire_layout.groups[0], **group)]
    ends = small_layout(), from_wire(msgspec.structs.replace(wire_layout, groups=groups))
    with pytest.raises(GeometryError) as caught:
        share(*([end] for end in (ends if not is_source else ends[::-1])))
    assert caught.value.field == field


def change(layout, **changes):
    good = to_wire(layout)
    pool = good.pools[0]
    view = msgspec.structs.replace(pool.views[0], **changes)
    return msgspec.structs.replace(good, pools=[msgspec.structs.replace(pool, views=[view, *pool.views[1:]])])


@pytest.mark.parametrize(
    "changes",
    [{"offset": 256}, {"heads": 100}, {"row_bytes": 1 << 40}, {"heads": MAX_ROWS, "head_stride": 0}],
    ids=str,
)
def test_a_view_outside_its_block_or_of_absurd_size_is_malformed(changes):
    with pytest.raises(MalformedMessageError):
        from_wire(change(small_layout(), **changes))


def test_a_group_of_pools_that_are_not_there_is_malformed():
    good = to_wire(small_layout())
    for pool_ids in ([], [1]):
        group = msgspec.structs.replace(good.groups[0], pools=pool_ids)
        with pytest.raises(MalformedMessageError):
            from_wire(msgspec.structs.replace(good, groups=[group]))
