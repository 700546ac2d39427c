import os
from collections.abc import Callable, Iterator

import pytest
import torch

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.cache.manager_v2 import KVCacheManagerV2
from kvferry.integrations.transformers.engine import PagedEngine
from kvferry.integrations.transformers.loading import LoadedModel, load_model
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.types import ManagerSpec, ModelGeometry

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MakeEngine = Callable[..., PagedEngine]
MANAGERS = {"V1": KVCacheManagerV1, "V2": KVCacheManagerV2}


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2", "float32")


@pytest.fixture(scope="session")
def gemma3() -> LoadedModel:
    return load_model("gemma3", "float32")


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint) -> Callable[[str], LoadedModel]:
    loaded: dict[str, LoadedModel] = {}

    def load(name: str) -> LoadedModel:
        if name not in loaded:
            loaded[name] = load_model(tiny_checkpoint(name), "float32")
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def make_manager() -> Callable[..., KVCacheManager]:
    def make(
        geometry: ModelGeometry,
        max_tokens: int = 4096,
        tokens_per_block: int = 32,
        *,
        kind: str = "V1",
        reuse: bool = True,
        **options: int,
    ) -> KVCacheManager:
        spec = ManagerSpec(kind, geometry, tokens_per_block, max_tokens, 0.9, reuse, "cpu", options=options)
        return MANAGERS[kind](spec)

    return make


@pytest.fixture
def make_engine(make_manager) -> MakeEngine:
    def make(loaded: LoadedModel, max_tokens: int = 4096, *, prefill_chunk: int = 512, **manager) -> PagedEngine:
        return PagedEngine(loaded, make_manager(loaded.geometry, max_tokens, **manager), prefill_chunk=prefill_chunk)

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[int]]:
    """transformers' own generate with its own cache: the output's token ids, of one prompt computed once."""
    known: dict[object, list[int]] = {}

    def recall(loaded: LoadedModel, prompt, max_tokens, **kwargs) -> list[int]:
        key = (loaded.path, tuple(prompt), max_tokens, *sorted(kwargs.items()))
        if kwargs.get("cache") is not None:
            return generate(loaded, prompt, max_tokens, **kwargs)
        if key not in known:
            known[key] = generate(loaded, prompt, max_tokens, **kwargs)
        return known[key]

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

    return recall


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing by threads, and lose much where other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
