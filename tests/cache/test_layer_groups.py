import pytest

from kvferry.cache.layer_groups import group_shapes
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape, ModelGeometry, RoleShape

KEY_VALUE = (RoleShape("key", 1, 4), RoleShape("value", 1, 4))


def groups_of(windows, tokens_per_block=32, **changes):
    geometry = ModelGeometry(len(windows), 1, 4, "float32", tuple(windows), **changes)
    return [shape.group for shape in group_shapes(geometry, tokens_per_block)]


def test_groups_come_in_the_order_of_their_first_layers_and_layers_are_global():
    groups = groups_of([512, 512, None, 512, None], first_layer=10, head_start=2, total_heads=4)
    assert [(group.layers, group.window, group.pools) for group in groups] == [
        ((10, 11, 13), 512, (0,)),
        ((12, 14), None, (1,)),
    ]
    assert {(group.head_start, group.total_heads) for group in groups} == {(2, 4)}


def test_layers_that_differ_in_roles_or_dtype_do_not_share_a_group():
    shapes = (
        LayerShape(KEY_VALUE),
        LayerShape((RoleShape("key", 2, 4), RoleShape("value", 2, 4))),
        LayerShape(KEY_VALUE, window=None),
        LayerShape((RoleShape("key", 1, 4, "bfloat16"), RoleShape("value", 1, 4, "bfloat16"))),
    )
    assert [group.layers for group in groups_of([None] * 4, layers=shapes)] == [(0, 2), (1,), (3,)]


def test_states_share_a_group_whatever_their_windows():
    state = RoleShape("state", 1, 9)
    shapes = (LayerShape((state,), "state", window=7), LayerShape((state,), "state"))
    (group,) = groups_of([7, None], layers=shapes)
    assert (group.kind, group.window, group.layers) == ("state", None, (0, 1))


@pytest.mark.parametrize(
    ("window", "tokens_per_block", "expected"),
    [(512, 32, 32), (128, 32, 32), (100, 32, 16), (16, 32, 4), (16, 12, 4), (3, 32, 1), (1, 8, 1), (4096, 32, 32)],
)
def test_a_windows_blocks_are_as_large_as_its_waste_allows_and_divide_the_chunk(window, tokens_per_block, expected):
    (group,) = groups_of([window], tokens_per_block)
    assert group.tokens_per_block == expected


def test_an_unknown_dtype_of_a_role_is_a_config_error():
    shape = LayerShape((RoleShape("state", 1, 9, "float99"),), "state")
    with pytest.raises(ConfigError, match="'float99' is not a torch dtype"):
        groups_of([None], layers=(shape,))
