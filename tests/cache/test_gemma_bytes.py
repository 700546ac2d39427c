"""Bytes that Gemma 3 270M's cache holds while it decodes, V2 against V1; dtype and width do not change the ratio."""

import pytest

from kvferry_plugins.types import ModelGeometry

WINDOWS = tuple(None if layer % 6 == 5 else 512 for layer in range(18))
TOKENS = 4096


@pytest.fixture
def decoded(make_manager):
    """A manager that has prefilled all but the last 16 tokens in chunks of 512, and decoded those one by one."""

    def decode() -> int:
        geometry = ModelGeometry(18, 1, 8, "bfloat16", WINDOWS)
        manager = make_manager(blocks=TOKENS // 32, tokens_per_block=32, geometry=geometry)
        prompt = TOKENS - 16
        manager.allocate(1, prompt, range(prompt), max_cached_tokens=prompt - 1)
        for stop in [*range(512, prompt, 512), *range(prompt, TOKENS + 1)]:
            manager.extend(1, stop)
            manager.advance(1, stop)
        return manager.bytes_in_use()

    return decode


@pytest.mark.parametrize("kind", ["V1"])
def test_v1_holds_every_token_of_every_layer(decoded, kind):
    assert decoded() == TOKENS * 18 * 2 * 8 * 2


@pytest.mark.parametrize("kind", ["V2"])
def test_v2_holds_at_most_two_fifths_of_that_while_decoding(decoded, kind):
    held, v1 = decoded(), TOKENS * 18 * 2 * 8 * 2
    full_layers = 3 / 18  # which keep all: nothing can be saved of them
    windows = 15 / 18 * 512 / TOKENS
    assert full_layers + windows == pytest.approx(0.2708, abs=1e-4)
    assert full_layers + windows <= held / v1 <= 0.28
