"""How one budget becomes blocks: shapes only, no memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import memory
from kvferry.cache.budget import DEFAULT_SEQUENCE, PREFILL_STEP, blocks_needed, share_out
from kvferry.cache.layer_groups import group_shapes
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape, ManagerSpec, ModelGeometry, RoleShape

STATE = LayerShape((RoleShape("state", 1, 100),), "state")
KEY_VALUE = LayerShape((RoleShape("key", 1, 4), RoleShape("value", 1, 4)))


def spec(
    windows=(None, 512, 512), max_tokens=8192, layers=(), tokens_per_block=32, fraction=0.5, **rest
) -> ManagerSpec:
    geometry = ModelGeometry(len(windows), 1, 4, "float32", tuple(windows), tuple(layers))
    return ManagerSpec("V2", geometry, tokens_per_block, max_tokens, fraction, True, "cpu", **rest)


def shares(made: ManagerSpec):
    return share_out(made, group_shapes(made.geometry, made.tokens_per_block))


def v1_bytes(made: ManagerSpec) -> int:
    return -(-made.max_tokens // made.tokens_per_block) * made.tokens_per_block * len(made.geometry.windows) * 32


def test_groups_share_what_v1_would_take_and_a_window_needs_less():
    made = spec()
    result = shares(made)
    full, window = result.num_blocks
    assert result.budget == v1_bytes(made)
    assert 0.98 * result.budget < result.nbytes <= result.budget
    assert full > 8192 // 32 > window
    assert result.sequence == DEFAULT_SEQUENCE
    assert "max_tokens=8192" in str(result)
    assert "a request of 4096 tokens" in str(result)


def test_without_windows_a_group_gets_exactly_v1s_blocks():
    assert shares(spec(windows=(None,) * 3, max_tokens=100)).num_blocks == (4,)


def test_states_come_on_top_one_for_each_request_of_a_batch():
    made = spec(windows=(None, None), layers=(KEY_VALUE, STATE), max_tokens=64, max_batch_size=3)
    result = shares(made)
    assert result.num_blocks == (2, 3)
    assert result.budget == 2 * 32 * 32 + 3 * 400
    assert "max_batch_size=3" in result.reason


def test_a_model_of_states_alone_needs_nothing_else():
    assert shares(spec(windows=(None,), layers=(STATE,), max_tokens=64)).num_blocks == (8,)


def test_the_longest_request_decides_how_much_windows_get():
    long, short = shares(spec(max_seq_len=8192)), shares(spec(max_seq_len=600))
    assert long.num_blocks[1] < short.num_blocks[1]
    assert (long.sequence, short.sequence) == (8192, 600)


def test_memory_that_holds_less_than_the_longest_request_is_shared_out_for_the_longest_that_fits(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda device: 1 << 17)
    result = shares(spec(max_tokens=None))
    assert result.sequence < DEFAULT_SEQUENCE
    assert result.nbytes <= result.budget == 1 << 16
    assert "0.5 of the 0 MiB that cpu has free" in result.reason


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ({}, r"leaves 1024 bytes, but 3072 are needed for 32 tokens; 1 layers with full attention: 1024 bytes a block"),
        ({"windows": (None, None), "layers": (KEY_VALUE, STATE), "max_batch_size": 5}, r"leaves -976 bytes"),
    ],
)
def test_a_budget_that_cannot_hold_one_block_a_group_is_a_config_error_with_the_figures(monkeypatch, changes, figures):
    monkeypatch.setattr(memory, "available_memory", lambda device: 2048)
    with pytest.raises(ConfigError, match=figures):
        shares(spec(max_tokens=None, **changes))


@given(
    windows=st.lists(st.none() | st.integers(1, 3000), min_size=1, max_size=6),
    max_tokens=st.integers(1, 20_000),
    tokens_per_block=st.sampled_from([1, 8, 32, 64]),
    max_seq_len=st.none() | st.integers(1, 30_000),
)
def test_the_budget_is_kept_and_one_request_of_all_tokens_always_fits(
    windows, max_tokens, tokens_per_block, max_seq_len
):
    made = spec(windows, max_tokens, tokens_per_block=tokens_per_block, max_seq_len=max_seq_len)
    result = shares(made)
    assert result.nbytes <= result.budget == v1_bytes(made)
    longest = max_tokens if max_seq_len is None else min(max_tokens, max_seq_len)
    for shape, num_blocks in zip(group_shapes(made.geometry, tokens_per_block), result.num_blocks, strict=True):
        assert num_blocks >= blocks_needed(shape.group, longest)
        assert blocks_needed(shape.group, longest) * shape.group.tokens_per_block >= min(longest, PREFILL_STEP)
