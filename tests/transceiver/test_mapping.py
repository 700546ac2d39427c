import ctypes
import random
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transceiver import geometries
from transceiver.geometries import Content, Memory, Rows, destination_tables, layouts_of, source_tables

from kvferry.testing import world_pair
from kvferry.testing.token_pattern import TokenRange, pool_memory, write_group, write_pattern
from kvferry.transceiver.checksum import checksum_destination, checksum_source
from kvferry.transceiver.coalesce import plan_segments
from kvferry.transceiver.mapping import GeometryError, MissingBlocksError, local_geometry, share
from kvferry_backends.native_agent import make_block_map
from kvferry_plugins.layout import KvLayout, LayerGroup, dense_pool
from kvferry_plugins.types import ModelGeometry, Topology


class HandOff:
    """A request on its way between two worlds in this process's memory."""

    def __init__(self, deployment, request, seed):
        self.deployment, self.request, chance = deployment, request, random.Random(seed)
        drawn = (layouts_of(deployment.geometry, side, chance) for side in (deployment.source, deployment.destination))
        self.sources, self.destinations = ([Memory(each, chance.randrange(99)) for each in side] for side in drawn)
        self.content = Content(deployment.geometry, request.prompt_tokens, seed)
        self._seeds = [chance.randrange(1 << 30) for _ in self.sources]
        self.wanted = [destination_tables(memory.layout, request, chance) for memory in self.destinations]
        self.overlaps = share([m.layout for m in self.sources], [m.layout for m in self.destinations])
        for memory, tables in zip(self.sources, self.held(request.prompt_tokens), strict=True):
            memory.write(self.content, tables, [Rows()] * len(tables))

    def held(self, computed):
        """Each source rank's tables at some moment."""
        return [
            source_tables(memory.layout, self.request, computed, random.Random(seed))
            for memory, seed in zip(self.sources, self._seeds, strict=True)
        ]

    def expected_memory(self):
        """Every destination rank's memory after a direct copy."""
        for memory, tables in zip(self.destinations, self.wanted, strict=True):
            after = Memory(memory.layout, 0)
            after.bytes[:] = memory.bytes
            if self.request.start_tokens < self.request.prompt_tokens:
                after.write(self.content, tables, [self._rows(group) for group in memory.layout.groups])
            yield after.bytes

    def _rows(self, group):
        """What of a destination group is written: under a window not what a source of smaller blocks may not have."""
        if group.kind == "state":
            return Rows()
        needed, source = 0, self.deployment.source
        if group.window and source.slides and source.tokens_per_block < group.tokens_per_block:
            needed = max(0, self.request.prompt_tokens + 1 - group.window)
        first = needed // source.tokens_per_block * source.tokens_per_block
        return Rows(self.request.start_tokens // group.tokens_per_block, first)

    def copies(self, source, destination):
        """Chunk by chunk."""
        prompt, start, done = self.request.prompt_tokens, self.request.start_tokens, self.request.start_tokens
        found = []
        for computed in self.request.computed:
            if computed > done:
                tables = self.held(computed)[source], self.wanted[destination]
                found += self.overlaps[source, destination].copies(*tables, prompt, start, done, computed)
                done = computed
        return found


def rows(copy):
    """Every run of every pair of blocks, one by one."""
    src, dst = copy.pools.src, copy.pools.dst
    for here, there in zip(copy.src.tolist(), copy.dst.tolist(), strict=True):
        for src_offset, dst_offset, nbytes in copy.pools.runs.tolist():
            yield (
                src.base + here * src.block_stride + src_offset,
                dst.base + there * dst.block_stride + dst_offset,
                nbytes,
            )


def joined(segments):
    """The same bytes in one way of writing them down."""
    found = []
    for src, dst, nbytes in sorted(segments):
        if found and found[-1][0] + found[-1][2] == src and found[-1][1] + found[-1][2] == dst:
            found[-1] = (*found[-1][:2], found[-1][2] + nbytes)
        else:
            found.append((src, dst, nbytes))
    return found


def assert_planners_agree(copy, segments):
    planned = zip(*(column.tolist() for column in plan_segments(copy.pools, copy.src, copy.dst)), strict=True)
    by_engine = make_block_map(copy.pools).plan(*(np.ascontiguousarray(ids) for ids in (copy.src, copy.dst)))
    assert joined(planned) == joined(map(tuple, by_engine)) == joined(segments)


@st.composite
def hand_offs(draw, kind):
    deployment = draw(geometries.deployments(kind))
    return HandOff(deployment, draw(geometries.requests(deployment)), draw(st.integers(0, 1 << 30)))


@pytest.mark.parametrize("kind", geometries.KINDS)
def test_what_arrives_equals_a_direct_copy_and_nothing_else_changes(kind):
    @settings(max_examples=520, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(hand_offs(kind))
    def check(hand_off):
        expected = list(hand_off.expected_memory())
        written = [np.zeros(len(memory.bytes), dtype=np.uint8) for memory in hand_off.destinations]
        for (source, destination), overlap in hand_off.overlaps.items():
            moved = 0
            base = hand_off.destinations[destination].bytes.ctypes.data
            for copy in hand_off.copies(source, destination):
                segments = list(rows(copy))
                assert_planners_agree(copy, segments)
                for src, dst, nbytes in segments:
                    ctypes.memmove(dst, src, nbytes)
                    written[destination][dst - base : dst - base + nbytes] += 1
                    moved += nbytes
            prompt, start = hand_off.request.prompt_tokens, hand_off.request.start_tokens
            nbytes, blocks = overlap.expected(hand_off.wanted[destination], prompt, start)
            assert (nbytes, bool(blocks)) == (moved, bool(moved))
        for memory, after, count in zip(hand_off.destinations, expected, written, strict=True):
            assert np.array_equal(memory.bytes, after)
            assert count.max(initial=0) <= 1

    check()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(hand_offs("mixed"))
def test_both_sides_checksum_the_same_bytes_in_the_same_order(hand_off):
    prompt, start = hand_off.request.prompt_tokens, hand_off.request.start_tokens
    held = hand_off.held(prompt)
    for (source, destination), overlap in hand_off.overlaps.items():
        wanted = hand_off.wanted[destination]
        copies = overlap.copies(held[source], wanted, prompt, start, start, prompt)
        for src, dst, nbytes in (row for copy in copies for row in rows(copy)):
            ctypes.memmove(dst, src, nbytes)
        assert checksum_source(copies) == checksum_destination(overlap.arrivals(wanted, prompt, start))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_what_our_own_managers_hold_arrives_too(data):
    deployment = data.draw(geometries.deployments())
    prompt_tokens = data.draw(st.integers(1, 30))
    with ExitStack() as stack:
        sources, destinations = (
            managers_of(stack, deployment.geometry, side) for side in (deployment.source, deployment.destination)
        )
        for manager in sources:
            manager.allocate(1, prompt_tokens)
            manager.extend(1, prompt_tokens)
            tokens = TokenRange(0, prompt_tokens)
            write_pattern(manager.layout, pool_memory(manager.layout), manager.block_table(1), tokens, 5)
            manager.advance(1, prompt_tokens)
        overlaps = share([manager.layout for manager in sources], [manager.layout for manager in destinations])
        for rank, manager in enumerate(destinations):
            manager.allocate(1, prompt_tokens + 1, history_tokens=prompt_tokens)
            after = [pool.copy() for pool in pool_memory(manager.layout)]
            groups, tables = manager.layout.groups, manager.block_table(1)
            left_out = [0] * len(groups)
            for (source, destination), overlap in overlaps.items():
                if destination == rank:
                    held = sources[source].block_table(1)
                    left_out = list(map(max, left_out, overlap.left_out(prompt_tokens, 0)))
                    fetch_all(overlap, held, tables, prompt_tokens)
            for group, table, missing in zip(groups, tables, left_out, strict=True):
                write_group(manager.layout, after, group, table, TokenRange(missing, prompt_tokens), 5)
            assert all(map(np.array_equal, pool_memory(manager.layout), after))


def fetch_all(overlap, held, tables, prompt_tokens):
    wanted = [
        table[: len(ordinals)]
        for table, ordinals in zip(tables, overlap.wanted_ordinals(prompt_tokens, 0), strict=True)
    ]
    for copy in overlap.copies(held, wanted, prompt_tokens, 0, 0, prompt_tokens):
        for src, dst, nbytes in rows(copy):
            ctypes.memmove(dst, src, nbytes)


def managers_of(stack, geometry, side):
    """One a rank: V2 where blocks slide, or layers differ, which V1 does not hold."""
    kind = "V2" if side.slides or geometry.layers else "V1"
    drawn = world_pair.Side(side.topology, kind, side.tokens_per_block, max_tokens=64)
    made = [world_pair.make_manager(drawn, geometry, rank) for rank in range(side.topology.ranks)]
    for manager in made:
        stack.callback(manager.shutdown)
    return made


# --- by example --------------------------------------------------------------------------------------------------

SHAPE = {"kv_heads": 4, "head_dim": 2, "tokens_per_block": 4}


def layout(layers=(0, 1), base=0, *, kv_heads=4, tokens_per_block=4, dtype="float16", head_dim=2, **group):
    pool = dense_pool(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tokens_per_block=tokens_per_block,
        item_bytes=2,
        num_blocks=16,
        base=base,
    )
    return KvLayout(dtype, (LayerGroup(layers, (0,), tokens_per_block, kv_heads, head_dim, **group),), (pool,))


def ids(*numbers):
    return [np.array(numbers, dtype=np.int32)]


def parts(geometry, topology):
    """Layouts of all ranks, of one group each."""
    for rank in range(topology.ranks):
        part = local_geometry(geometry, topology, rank)
        layers = tuple(range(part.first_layer, part.first_layer + part.num_layers))
        yield layout(layers, kv_heads=part.kv_heads, head_start=part.head_start, total_heads=part.total_heads)


def test_equal_dense_blocks_are_one_run_and_consecutive_ones_one_segment():
    overlap = share([layout()], [layout(base=1 << 20)])[0, 0]
    (copy,) = overlap.copies(ids(2, 3, 4), ids(7, 8, 9), 12, 0, 0, 12)
    assert copy.pools.is_dense
    assert [column.tolist() for column in plan_segments(copy.pools, copy.src, copy.dst)] == [
        [2 * 256],
        [(1 << 20) + 7 * 256],
        [3 * 256],
    ]


def test_a_copy_of_pools_is_the_same_object_from_call_to_call():
    overlap = share([layout()], [layout()])[0, 0]
    first, again = (overlap.copies(ids(0, 1), ids(0, 1), 7, 0, 0, 7) for _ in range(2))
    assert [copy.pools for copy in first] == [copy.pools for copy in again]
    assert len(first) == 2


def test_the_padding_behind_the_prompt_stays():
    overlap = share([layout()], [layout()])[0, 0]
    assert overlap.expected(ids(0, 1), 5, 0) == (5 * 64, 2)
    assert sum(copy.nbytes for copy in overlap.copies(ids(0, 1), ids(0, 1), 5, 0, 0, 5)) == 5 * 64


def test_sources_that_hold_the_same_head_take_turns():
    latent = ModelGeometry(2, 1, 2, "float16", (None, None))
    four = list(parts(latent, Topology(tensor=4)))
    assert sorted(share(four, four)) == [(rank, rank) for rank in range(4)]
    assert sorted(share(four, four[:2])) == [(0, 0), (1, 1)]
    assert sorted(share(four[:1], four)) == [(0, rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("source", "destination", "pairs"),
    [
        (Topology(2), Topology(4), [(0, 0), (0, 1), (1, 2), (1, 3)]),
        (Topology(4), Topology(2), [(0, 0), (1, 0), (2, 1), (3, 1)]),
        (Topology(1, 2), Topology(2, 1), [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (Topology(8), Topology(1), [(0, 0), (2, 0), (4, 0), (6, 0)]),
    ],
    ids=str,
)
def test_ranks_meet_where_heads_and_layers_do(source, destination, pairs):
    model = ModelGeometry(2, 4, 2, "float16", (None, None))
    assert sorted(share(list(parts(model, source)), list(parts(model, destination)))) == pairs


@pytest.mark.parametrize(
    ("there", "field"),
    [
        (layout(dtype="bfloat16"), "dtype"),
        (layout((0, 1, 2)), "layers"),
        (layout(kv_heads=8), "kv_heads"),
        (layout(total_heads=8), "kv_heads"),
        (layout(head_dim=3), "roles"),
        (layout(tokens_per_block=6), "tokens_per_block"),
        (layout(kind="latent"), "kinds"),
    ],
)
def test_what_cannot_be_mapped_names_the_field(there, field):
    with pytest.raises(GeometryError) as caught:
        share([layout()], [there])
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("here", "there", "field"),
    [
        ({"window": 8}, {}, "windows"),
        ({"window": 8}, {"window": 9}, "windows"),
        ({"window": 8}, {"window": 8, "tokens_per_block": 6}, "tokens_per_block"),
        ({"window": 8}, {"window": 8, "tokens_per_block": 8}, None),
        ({}, {"window": 8, "tokens_per_block": 8}, None),
        ({"window": 8}, {"window": 8, "tokens_per_block": 2}, None),
        ({"window": 8}, {"window": 5}, None),
    ],
)
def test_a_source_that_lets_blocks_slide_away_serves_no_more_than_it_keeps(here, there, field):
    if field is None:
        assert share([layout(**here)], [layout(**there)])
        return
    with pytest.raises(GeometryError) as caught:
        share([layout(**here)], [layout(**there)])
    assert caught.value.field == field


def test_a_head_that_no_source_has_is_missed():
    second = layout(kv_heads=2, head_start=2, total_heads=4)
    with pytest.raises(GeometryError, match="no context rank holds head 0 of layer 0's key"):
        share([second], [layout()])


def test_a_block_that_is_wanted_and_not_here_is_never_passed_over_in_silence():
    overlap = share([layout()], [layout()])[0, 0]
    with pytest.raises(MissingBlocksError, match=r"group 0 \(layers 0, 1\) lacks 1 of 3 blocks"):
        overlap.copies(ids(0, -1, 2), ids(0, 1, 2), 12, 0, 0, 12)
    with pytest.raises(MissingBlocksError, match="has 2 blocks here, 3 are needed"):
        overlap.copies(ids(0, 1), ids(0, 1, 2), 12, 0, 0, 12)
    (copy,) = overlap.copies(ids(0, -1, 2), ids(0, -1, 2), 12, 0, 0, 12)
    assert copy.src.tolist() == copy.dst.tolist() == [0, 2]


def test_a_whole_prefix_that_is_there_moves_nothing():
    overlap = share([layout()], [layout()])[0, 0]
    assert overlap.expected(ids(), 8, 8) == (0, 0)
    assert overlap.copies(ids(0, 1), ids(), 8, 8, 8, 8) == []


def test_a_state_travels_whole_and_with_the_last_chunk_alone():
    state = layout(kind="state", tokens_per_block=1)
    state = replace(state, groups=(replace(state.groups[0], tokens_per_block=4),))
    overlap = share([state], [state])[0, 0]
    assert overlap.copies(ids(3), ids(5), 9, 0, 0, 8) == []
    (copy,) = overlap.copies(ids(3), ids(5), 9, 0, 8, 9)
    assert (copy.nbytes, *overlap.expected(ids(5), 9, 0)) == (64, 64, 1)
