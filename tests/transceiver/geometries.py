"""Drawn models, topologies, layouts and requests, for whoever hands over between unequal worlds.

``deployments`` draws what two sides are, in the contract's own terms, so that real managers can be built from it;
``layouts_of`` builds a side's layouts as no manager of ours would have them (with gaps, a pool a layer, heads within
tokens).
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from kvferry.topology import local_geometry
from kvferry.transceiver.mapping import wanted_ordinals
from kvferry_plugins.layout import BlockIds, KvLayout, LayerGroup, Pool, RoleView
from kvferry_plugins.types import LayerShape, ModelGeometry, RoleShape, Topology

ITEM_BYTES = 2
KINDS = ("attention", "windows", "latent", "mixed")
TOPOLOGIES = [Topology(tensor, pipeline) for tensor in (1, 2, 4) for pipeline in (1, 2)]


@dataclass(frozen=True)
class Side:
    """One worker: all of its ranks."""

    topology: Topology
    tokens_per_block: int
    slides: bool
    """Whether its manager lets blocks slide out of windows, as V2 does."""

    def geometries(self, geometry: ModelGeometry) -> list[ModelGeometry]:
        return [local_geometry(geometry, self.topology, rank) for rank in range(self.topology.ranks)]


@dataclass(frozen=True)
class Deployment:
    """A model, and two workers that can hand over."""

    geometry: ModelGeometry
    source: Side
    destination: Side


@dataclass(frozen=True)
class Request:
    """What is handed over, and how its prefill goes on."""

    prompt_tokens: int
    start_tokens: int
    computed: tuple[int, ...]
    """After each chunk; the last is the prompt."""


@st.composite
def deployments(draw: st.DrawFn, kind: str | None = None) -> Deployment:
    """Draw two sides between which every byte has a way."""
    kind = kind or draw(st.sampled_from(KINDS))
    geometry = draw(_geometries(kind))
    windowed = any(geometry.shape(layer).window for layer in range(geometry.num_layers))
    topologies = st.sampled_from(TOPOLOGIES)
    blocks = draw(st.sampled_from([(4, 4), (4, 4), (8, 2), (4, 2), (2, 4), (2, 8), (3, 3), (1, 4)]))
    source_slides = windowed and draw(st.booleans())
    destination_slides = windowed and (source_slides or draw(st.booleans()))
    return Deployment(
        geometry,
        Side(draw(topologies), blocks[0], source_slides),
        Side(draw(topologies), blocks[1], destination_slides),
    )


@st.composite
def _geometries(draw: st.DrawFn, kind: str) -> ModelGeometry:
    layers = draw(st.integers(2, 5))
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    width = draw(st.integers(1, 3))
    windows: list[int | None] = [None] * layers
    shapes: tuple[LayerShape, ...] = ()
    if kind in ("windows", "mixed"):
        windows = draw(st.lists(st.sampled_from([None, 3, 7, 12]), min_size=layers, max_size=layers))
    if kind == "latent":
        shapes = tuple(LayerShape((RoleShape("latent", 1, width),), "latent", window) for window in windows)
    if kind == "mixed":
        shapes = tuple(draw(_shapes(heads, width, window)) for window in windows)
    return ModelGeometry(layers, heads, width, "float16", tuple(windows), shapes)


@st.composite
def _shapes(draw: st.DrawFn, heads: int, width: int, window: int | None) -> LayerShape:
    kind = draw(st.sampled_from(["attention", "latent", "state", "unequal"]))
    if kind == "latent":
        return LayerShape((RoleShape("latent", 1, width), RoleShape("index", 1, 2)), "latent", window)
    if kind == "state":
        return LayerShape((RoleShape("recurrent", heads, 5 * width), RoleShape("conv", 2 * heads, 3)), "state")
    return LayerShape(
        (RoleShape("key", heads, width), RoleShape("value", heads, width + (kind == "unequal"))), "attention", window
    )


@st.composite
def requests(draw: st.DrawFn, deployment: Deployment) -> Request:
    """Draw a prompt, how much of it the destination has, and the chunks in which it is computed."""
    prompt = draw(st.integers(1, 30))
    block = deployment.destination.tokens_per_block
    start = draw(st.integers(0, prompt // block)) * block if draw(st.booleans()) else 0
    if any(deployment.geometry.shape(layer).kind == "state" for layer in range(deployment.geometry.num_layers)):
        start = 0
    cuts = draw(st.sets(st.integers(1, prompt), max_size=4)) if draw(st.booleans()) else set()
    return Request(prompt, start, tuple(sorted(cuts | {prompt})))


# --- layouts -----------------------------------------------------------------------------------------------------


def layouts_of(geometry: ModelGeometry, side: Side, chance: random.Random) -> list[KvLayout]:
    """One layout a rank, at base 0 and with blocks for one request and some more."""
    return [_layout(part, side, chance) for part in side.geometries(geometry)]


def _layout(geometry: ModelGeometry, side: Side, chance: random.Random) -> KvLayout:
    shapes = {geometry.first_layer + index: geometry.shape(index) for index in range(geometry.num_layers)}
    if not side.slides:
        shapes = {layer: replace(shape, window=None) for layer, shape in shapes.items()}
    life_cycles: dict[object, list[int]] = {}
    for layer, shape in shapes.items():
        name = (shape.kind, shape.window, shape.roles) if side.slides or shape.kind == "state" else shape.kind
        life_cycles.setdefault(name, []).append(layer)
    groups, pools = [], []
    for layers in life_cycles.values():
        apart = chance.random() < 0.2
        parts = [[layer] for layer in layers] if apart else [layers]
        numbers = range(len(pools), len(pools) + len(parts))
        tokens = 1 if shapes[layers[0]].kind == "state" else side.tokens_per_block
        pools += [_pool([(layer, shapes[layer]) for layer in part], tokens, chance) for part in parts]
        groups.append(_group(layers, numbers, shapes[layers[0]], side.tokens_per_block))
    return KvLayout(geometry.dtype, tuple(groups), tuple(pools))


def _group(layers: Sequence[int], pools: range, shape: LayerShape, tokens_per_block: int) -> LayerGroup:
    return LayerGroup(
        layers=tuple(layers),
        pools=tuple(pools),
        tokens_per_block=tokens_per_block,
        kv_heads=shape.roles[0].heads,
        head_dim=shape.roles[0].width,
        window=shape.window,
        kind=shape.kind,
        head_start=shape.head_start,
        total_heads=shape.total_heads,
    )


def _pool(shapes: Sequence[tuple[int, LayerShape]], tokens: int, chance: random.Random) -> Pool:
    """Dense, or with gaps, or with the heads within a token."""
    heads_within, gap = chance.random() < 0.25, chance.choice([0, 0, 0, 3])
    views, offset = [], 0
    for layer, role in ((layer, role) for layer, shape in shapes for role in shape.roles):
        row = role.width * ITEM_BYTES
        head, token = (row, row * role.heads) if heads_within else (row * tokens + gap, row)
        views.append(RoleView(layer, role.name, offset, role.heads, head, tokens, token, row))
        offset += role.heads * tokens * row + gap * role.heads
    return Pool(0, offset + gap, chance.randint(40, 48), tuple(views))


# --- block tables ------------------------------------------------------------------------------------------------


def source_tables(layout: KvLayout, request: Request, computed: int, chance: random.Random) -> list[BlockIds]:
    """From ordinal 0 on, what is complete and has not slid out of a window; the same for the same chance."""
    tables = []
    for index, group in enumerate(layout.groups):
        table = _ids(group.blocks_for(request.prompt_tokens), layout.num_blocks(index), chance)
        table[: group.first_block_needed(request.prompt_tokens)] = -1
        if computed < request.prompt_tokens:
            table[0 if group.kind == "state" else computed // group.tokens_per_block :] = -1
        tables.append(table)
    return tables


def destination_tables(layout: KvLayout, request: Request, chance: random.Random) -> list[BlockIds]:
    """The wanted ordinals; −1 where a window leaves them out, and sometimes where nobody knows why."""
    tables = []
    for index, group in enumerate(layout.groups):
        ordinals = wanted_ordinals(group, request.prompt_tokens, request.start_tokens)
        table = _ids(len(ordinals), layout.num_blocks(index), chance)
        needed = group.first_block_needed(request.prompt_tokens)
        table[: max(0, needed - ordinals.start)] = -1
        if chance.random() < 0.1:
            table[np.array([chance.random() < 0.3 for _ in ordinals], dtype=bool)] = -1
        tables.append(table)
    return tables


def _ids(count: int, blocks: int, chance: random.Random) -> BlockIds:
    """Blocks from all over the pool, or a run of them."""
    if chance.random() < 0.5:
        first = chance.randint(0, blocks - count)
        return np.arange(first, first + count, dtype=np.int32)
    return np.array(chance.sample(range(blocks), count), dtype=np.int32)


# --- memory ------------------------------------------------------------------------------------------------------


class Memory:
    """One rank's pools, as bytes; ``layout`` has their addresses."""

    def __init__(self, layout: KvLayout, noise: int) -> None:
        ends = list(itertools.accumulate((pool.nbytes + 5 for pool in layout.pools), initial=0))
        self.bytes = np.random.default_rng(noise).integers(0, 256, ends[-1], dtype=np.uint8)
        base = self.bytes.ctypes.data
        pools = tuple(replace(pool, base=base + end) for pool, end in zip(layout.pools, ends, strict=False))
        self.layout = replace(layout, pools=pools)

    def write(self, content: "Content", tables: Sequence[BlockIds], rows: Sequence["Rows"]) -> None:
        """Put a request's content into its blocks, some rows a group."""
        for group, table, wanted in zip(self.layout.groups, tables, rows, strict=True):
            for pool in (self.layout.pools[index] for index in group.pools):
                for view in pool.views:
                    if view.layer in group.layers:
                        self._write_view(content, group, pool, view, table, wanted)

    def _write_view(self, content, group, pool, view, table, wanted) -> None:
        head = group.head_start * view.heads // group.kv_heads
        rows = content.of(view)[head : head + view.heads]
        for ordinal, block in enumerate(table.tolist(), wanted.first_ordinal):
            if block != -1:
                at = pool.base - self.bytes.ctypes.data + block * pool.block_stride + view.offset
                strides = (view.head_stride, view.token_stride, 1)
                shape = (view.heads, view.tokens, view.row_bytes)
                there = np.lib.stride_tricks.as_strided(self.bytes[at:], shape, strides)
                begin = ordinal * view.tokens
                skipped = min(max(0, wanted.first_token - begin), view.tokens)
                mine = rows[:, begin + skipped : min(begin + view.tokens, rows.shape[1])]
                there[:, skipped : skipped + mine.shape[1]] = mine


@dataclass(frozen=True)
class Rows:
    """Which rows of a group's blocks are written."""

    first_ordinal: int = 0
    """Of the table."""
    first_token: int = 0


class Content:
    """What a request's tokens hold, by layer, role, head of the whole model, and token."""

    def __init__(self, geometry: ModelGeometry, prompt_tokens: int, seed: int) -> None:
        chance = np.random.default_rng(seed)
        self._rows = {}
        for layer in range(geometry.num_layers):
            shape = geometry.shape(layer)
            tokens = 1 if shape.kind == "state" else prompt_tokens
            for role in shape.roles:
                size = (role.heads, tokens, role.width * ITEM_BYTES)
                self._rows[layer, role.name] = chance.integers(0, 256, size, dtype=np.uint8)

    def of(self, view: RoleView) -> np.ndarray:
        return self._rows[view.layer, view.role]
