"""What is planned is what a manager then has, but for memory."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cache.item_bytes import ITEM_BYTES, item_bytes
from kvferry.cache.layouts import grouped_layout, uniform_layout
from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.cache.manager_v2 import KVCacheManagerV2
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape, ManagerSpec, ModelGeometry, RoleShape

ATTENTION = LayerShape((RoleShape("key", 2, 8), RoleShape("value", 2, 8)))
SHAPES = (
    ATTENTION,
    replace(ATTENTION, window=5),
    replace(ATTENTION, window=12),
    LayerShape((RoleShape("key", 2, 8), RoleShape("value", 2, 4))),
    LayerShape((RoleShape("latent", 1, 12),), "latent"),
    LayerShape((RoleShape("conv", 1, 3), RoleShape("recurrent", 1, 5, "float32")), "state"),
)


def spec_of(geometry: ModelGeometry, tokens_per_block: int = 4) -> ManagerSpec:
    return ManagerSpec("V2", geometry, tokens_per_block, 64, 0.1, True, "cpu", max_batch_size=2)


def without_memory(layout):
    return replace(layout, pools=tuple(replace(pool, base=0, num_blocks=0) for pool in layout.pools))


@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    tokens_per_block=st.sampled_from([1, 4, 16, 48]),
    first_layer=st.sampled_from([0, 7]),
)
@settings(max_examples=40)
def test_groups_are_planned_as_they_are_built(shapes, dtype, tokens_per_block, first_layer):
    windows = tuple(shape.window for shape in shapes)
    geometry = ModelGeometry(len(shapes), 2, 8, dtype, windows, tuple(shapes), first_layer)
    spec = spec_of(geometry, tokens_per_block)
    manager = KVCacheManagerV2(spec)
    try:
        assert without_memory(manager.layout) == grouped_layout(spec)
    finally:
        manager.shutdown()


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    start=st.sampled_from([0, 2]),
    tokens_per_block=st.sampled_from([1, 4, 48]),
    window=st.sampled_from([None, 8]),
)
@settings(max_examples=20)
def test_one_pool_is_planned_as_it_is_built(layers, heads, start, tokens_per_block, window):
    geometry = ModelGeometry(layers, heads, 8, "float16", (window,) * layers, head_start=start, total_heads=6)
    spec = spec_of(geometry, tokens_per_block)
    manager = KVCacheManagerV1(spec)
    try:
        assert without_memory(manager.layout) == uniform_layout(spec)
    finally:
        manager.shutdown()


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_an_element_has_the_bytes_that_it_has_in_torch(name):
    assert item_bytes(name) == getattr(torch, name).itemsize


@pytest.mark.parametrize("name", ["float31", "", "quint4x2", "Tensor"])
def test_a_dtype_that_no_cache_is_kept_in_is_refused_by_name(name):
    with pytest.raises(ConfigError, match="is not a torch dtype") as caught:
        item_bytes(name)
    assert caught.value.setting == "kv_cache_config.dtype"


def test_one_pool_has_no_place_for_a_layer_that_is_unlike_the_others():
    geometry = ModelGeometry(2, 2, 8, "float32", (None, None), (ATTENTION, SHAPES[-1]))
    with pytest.raises(ConfigError, match="layer 1 keeps conv, recurrent"):
        uniform_layout(spec_of(geometry))


def test_planning_needs_no_torch():
    code = "import sys, kvferry.cache.layouts; print([n for n in ('torch', 'zmq') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
