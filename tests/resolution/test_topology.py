import itertools
from dataclasses import replace

import pytest

from kvferry.checkpoint import ModelSpec
from kvferry.dispatcher import resolve
from kvferry.testing import isolated_registry
from kvferry.topology import local_geometry
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape, ModelGeometry, RoleShape, Topology

GEOMETRY = ModelGeometry(7, 8, 16, "float32", (None, 512, None, 512, None, 512, None))
LATENT = LayerShape((RoleShape("latent", 1, 40),), "latent")
STATE = LayerShape((RoleShape("recurrent", 8, 64), RoleShape("conv", 16, 12)), "state")
MIXED = replace(GEOMETRY, layers=(LATENT, STATE) * 3 + (LATENT,))


def ranks(topology, geometry=GEOMETRY):
    return [local_geometry(geometry, topology, rank) for rank in range(topology.ranks)]


def test_the_only_rank_has_everything():
    assert ranks(Topology()) == [GEOMETRY]


@pytest.mark.parametrize(("stages", "counts"), [(2, [4, 3]), (3, [3, 2, 2]), (7, [1] * 7)])
def test_stages_take_consecutive_layers_and_the_first_ones_one_more(stages, counts):
    parts = ranks(Topology(pipeline=stages))
    assert [part.num_layers for part in parts] == counts
    assert [part.first_layer for part in parts] == [sum(counts[:stage]) for stage in range(stages)]
    assert tuple(itertools.chain.from_iterable(part.windows for part in parts)) == GEOMETRY.windows


@pytest.mark.parametrize(
    ("size", "expected"),
    [(2, [(0, 4), (4, 4)]), (8, [(head, 1) for head in range(8)]), (16, [(rank // 2, 1) for rank in range(16)])],
)
def test_heads_are_split_or_held_by_several_consecutive_ranks(size, expected):
    parts = ranks(Topology(tensor=size))
    assert [(part.head_start, part.kv_heads) for part in parts] == expected
    assert {part.total_heads for part in parts} == {8}


def test_ranks_are_numbered_stage_by_stage():
    parts = ranks(Topology(tensor=2, pipeline=2))
    assert [(part.first_layer, part.head_start) for part in parts] == [(0, 0), (0, 4), (4, 0), (4, 4)]


def test_every_rank_holds_a_latent_row_and_its_part_of_a_state():
    part = ranks(Topology(tensor=4), MIXED)[3]
    latent, state = part.layers[:2]
    assert (latent.roles, latent.head_start, latent.total_heads) == (LATENT.roles, 0, 1)
    assert [role.heads for role in state.roles] == [2, 4]
    assert (state.head_start, state.total_heads) == (6, 8)


def test_roles_are_cut_in_one_proportion_where_several_ranks_hold_the_same():
    state = ranks(Topology(tensor=16), MIXED)[5].layers[1]
    assert [role.heads for role in state.roles] == [1, 2]
    assert state.head_start == 2


@pytest.mark.parametrize(
    ("topology", "geometry", "setting", "message"),
    [
        (Topology(tensor=3), GEOMETRY, "tensor_parallel_size", "8 heads, and neither divides the other"),
        (Topology(tensor=12), GEOMETRY, "tensor_parallel_size", "neither divides the other"),
        (Topology(pipeline=8), GEOMETRY, "pipeline_parallel_size", "has 7 layers"),
        (
            Topology(tensor=2),
            replace(GEOMETRY, layers=(replace(STATE, roles=(*STATE.roles, RoleShape("odd", 3, 1))),) * 7),
            "tensor_parallel_size",
            "layer 0's odd has 3 heads",
        ),
        (
            Topology(),
            replace(GEOMETRY, windows=(None,) * 6 + (0,)),
            "kv_cache_config.max_attention_window",
            "a sliding window of 0 tokens",
        ),
    ],
)
def test_what_cannot_be_shared_out_names_the_setting(topology, geometry, setting, message):
    with pytest.raises(ConfigError, match=message) as caught:
        local_geometry(geometry, topology, 0)
    assert caught.value.setting == setting


def test_a_rank_that_is_none_is_refused():
    with pytest.raises(ValueError, match="rank 4 is none of the 4 ranks"):
        local_geometry(GEOMETRY, Topology(2, 2), 4)


SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 6, "hidden_size": 64}


@pytest.mark.parametrize(
    ("sizes", "setting"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size"),
        ({"tensor_parallel_size": 3, "pipeline_parallel_size": 4}, None),
        ({"tensor_parallel_size": 12}, None),
    ],
    ids=str,
)
def test_a_topology_is_checked_at_resolution_where_the_checkpoint_says_its_shape(sizes, setting):
    model = ModelSpec("AcmeForCausalLM", {"architectures": ["AcmeForCausalLM"], **SHAPE})
    if setting is None:
        assert resolve(sizes, model=model, registry=isolated_registry(), environ={}).manager == "V1"
        return
    with pytest.raises(ConfigError) as caught:
        resolve(sizes, model=model, registry=isolated_registry(), environ={})
    assert caught.value.setting == setting


def test_a_checkpoint_without_a_shape_is_left_to_the_build():
    model = ModelSpec("AcmeForCausalLM", {"architectures": ["AcmeForCausalLM"]})
    assert resolve({"tensor_parallel_size": 4}, model=model, registry=isolated_registry(), environ={})
