from collections.abc import Callable

import pytest

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.cache.manager_v2 import KVCacheManagerV2
from kvferry_plugins.kv_cache import CacheStatistics, KVCacheManager
from kvferry_plugins.types import ManagerSpec, ModelGeometry

MANAGERS = {"V1": KVCacheManagerV1, "V2": KVCacheManagerV2}

MakeManager = Callable[..., KVCacheManager]


@pytest.fixture
def kind() -> str:
    """Which manager a module is about; modules say so by a fixture of this name."""
    return "V2"


@pytest.fixture
def make_manager(kind: str) -> MakeManager:
    def make(
        blocks: int | None = 8, tokens_per_block: int = 4, reuse: bool = True, dtype: str = "float32", **changes: object
    ) -> KVCacheManager:
        geometry = ModelGeometry(num_layers=3, kv_heads=2, head_dim=8, dtype=dtype, windows=(None,) * 3)
        fields: dict[str, object] = {
            "kind": kind,
            "geometry": geometry,
            "tokens_per_block": tokens_per_block,
            "max_tokens": None if blocks is None else blocks * tokens_per_block,
            "free_memory_fraction": 0.9,
            "enable_block_reuse": reuse,
            "device": "cpu",
        }
        return MANAGERS[kind](ManagerSpec(**(fields | changes)))  # type: ignore[arg-type]

    return make


@pytest.fixture
def manager(make_manager: MakeManager) -> KVCacheManager:
    return make_manager()


@pytest.fixture
def counts() -> Callable[..., tuple[int, int, int]]:
    """Free, cached and used blocks of a group."""

    def counts(manager: KVCacheManager, group: int = 0) -> tuple[int, int, int]:
        figures: CacheStatistics = manager.statistics(group)
        assert figures.total == figures.free + figures.cached + figures.in_use
        return figures.free, figures.cached, figures.in_use

    return counts
