from collections.abc import Callable

import pytest

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry_plugins.types import ManagerSpec, ModelGeometry

MakeManager = Callable[..., KVCacheManagerV1]


@pytest.fixture
def make_manager() -> MakeManager:
    def make(
        blocks: int | None = 8, tokens_per_block: int = 4, reuse: bool = True, dtype: str = "float32", **changes: object
    ) -> KVCacheManagerV1:
        geometry = ModelGeometry(num_layers=3, kv_heads=2, head_dim=8, dtype=dtype, windows=(None,) * 3)
        fields: dict[str, object] = {
            "kind": "V1",
            "geometry": geometry,
            "tokens_per_block": tokens_per_block,
            "max_tokens": None if blocks is None else blocks * tokens_per_block,
            "free_memory_fraction": 0.9,
            "enable_block_reuse": reuse,
            "device": "cpu",
        }
        return KVCacheManagerV1(ManagerSpec(**(fields | changes)))  # type: ignore[arg-type]

    return make


@pytest.fixture
def manager(make_manager: MakeManager) -> KVCacheManagerV1:
    return make_manager()
