import pytest

from kvferry.integrations.transformers.engine import GenerationRequest

NEW_TOKENS = 6
STORY = " ".join(f"On day {day} the ferry took {day * 7 % 13} cars across the river." for day in range(1, 100))
WINDOW = 512

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def story(gemma3):
    tokens = tuple(gemma3.tokenizer(STORY).input_ids)
    assert len(tokens) > 1100
    return tokens


def test_every_sixth_layer_sees_everything(gemma3):
    assert gemma3.geometry.windows == ((WINDOW,) * 5 + (None,)) * 3
    assert (gemma3.geometry.kv_heads, gemma3.geometry.head_dim, gemma3.geometry.layers) == (1, 256, ())


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("kind", ["V1", "V2"])
def test_greedy_decoding_equals_transformers_own_cache(gemma3, make_engine, reference, story, kind, reuse):
    engine = make_engine(gemma3, 2048, kind=kind, reuse=reuse, prefill_chunk=280)
    first, branch = story[:560], (*story[:540], *story[1000:1030])
    for number, prompt in enumerate([first, branch] if reuse else [first]):
        running = engine.prefill(GenerationRequest(number, prompt, NEW_TOKENS, ignore_stop=True))
        assert running.cached_tokens == (512 if number else 0)
        for group, table in zip(engine.manager.layout.groups, engine.manager.block_table(number), strict=True):
            assert (table >= 0).sum() <= group.blocks_for(group.window or len(prompt)) + 1
        assert list(engine.decode(running)) == reference(gemma3, prompt, NEW_TOKENS, chunk=280, ignore_stop=True)
    assert all(engine.manager.statistics(group).in_use == 0 for group in range(len(engine.manager.layout.groups)))
