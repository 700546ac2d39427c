import pytest
import torch
from transformers import DynamicCache

from kvferry.integrations.transformers.loading import load_model

NEW_TOKENS = 24
CHUNK = 512
DIARY = " ".join(f"On day {day} the ferry took {day * 7 % 13} cars across the river." for day in range(1, 160))


@pytest.fixture(scope="module")
def loaded():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model("smollm2", "float32")
    torch.set_num_threads(before)


def generate(loaded, prompt, cache=None):
    """transformers' own generate with its own cache."""
    ids = torch.tensor([prompt])
    output = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        prefill_chunk_size=CHUNK,
        cache=DynamicCache(config=loaded.model.config) if cache is None else cache,
    )
    return output[0, len(prompt) :].tolist()


def cache_of(loaded, prompt, tokens):
    """transformers' own cache of a prompt's beginning, computed in the chunks that the whole prompt was."""
    cache = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        for start in range(0, len(prompt), CHUNK):
            loaded.model(torch.tensor([prompt[start : start + CHUNK]]), cache=cache)
    cache.crop(tokens - len(prompt))
    return cache


def test_five_prompts_equal_transformers_token_for_token(pair, loaded):
    long = loaded.tokenizer(DIARY)["input_ids"][:2050]
    assert len(long) >= 2000
    branch = [*long[:1990], *loaded.tokenizer(" In short, the ferry")["input_ids"]]
    short = [loaded.tokenizer(text)["input_ids"] for text in ("Grey seals live", "def add(a, b):", "Ferries are")]

    for prompt in (*short, long):
        answer = pair.ask(prompt=prompt, max_tokens=NEW_TOKENS)
        assert answer["choices"][0]["token_ids"] == generate(loaded, prompt)
        assert answer["kvferry"]["handoff"]["cached_tokens"] == 0
        assert answer["kvferry"]["handoff"]["bytes"] == len(prompt) * pair.token_bytes

    answer = pair.ask(prompt=branch, max_tokens=NEW_TOKENS)
    shared = 1990 // pair.block_tokens * pair.block_tokens
    assert answer["kvferry"]["handoff"]["cached_tokens"] == shared
    assert answer["kvferry"]["handoff"]["bytes"] == (len(branch) - shared) * pair.token_bytes
    assert answer["choices"][0]["token_ids"] == generate(loaded, branch, cache_of(loaded, long, shared))
