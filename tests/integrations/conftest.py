import os
from collections.abc import Callable

import pytest
import torch

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.integrations.transformers.engine import PagedEngine
from kvferry.integrations.transformers.loading import LoadedModel, load_model
from kvferry_plugins.types import ManagerSpec, ModelGeometry

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MakeEngine = Callable[..., PagedEngine]


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2", "float32")


@pytest.fixture(scope="session")
def make_manager() -> Callable[..., KVCacheManagerV1]:
    def make(geometry: ModelGeometry, max_tokens: int = 4096, tokens_per_block: int = 32) -> KVCacheManagerV1:
        return KVCacheManagerV1(ManagerSpec("V1", geometry, tokens_per_block, max_tokens, 0.9, True, "cpu"))

    return make


@pytest.fixture
def make_engine(make_manager) -> MakeEngine:
    def make(loaded: LoadedModel, max_tokens: int = 4096, *, prefill_chunk: int = 512) -> PagedEngine:
        return PagedEngine(loaded, make_manager(loaded.geometry, max_tokens), prefill_chunk=prefill_chunk)

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[int]]:
    """transformers' own generate with its own cache: the output's token ids."""

    def generate(loaded: LoadedModel, prompt, max_tokens, *, cache=None, chunk=512, ignore_stop=False) -> list[int]:
        from transformers import DynamicCache

        prompt_ids = torch.tensor([prompt])
        stop = {"eos_token_id": None} if ignore_stop else {}
        output = loaded.model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            prefill_chunk_size=chunk,
            cache=DynamicCache(config=loaded.model.config) if cache is None else cache,
            **stop,
        )
        return output[0, len(prompt) :].tolist()

    return generate
