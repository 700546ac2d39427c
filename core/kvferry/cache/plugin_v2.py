"""Declares KV-cache manager V2; the manager itself is imported when one is built."""

from kvferry_plugins import hookimpl
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.types import ManagerKind, ManagerSpec

_KIND = ManagerKind(
    name="V2",
    class_name="KVCacheManagerV2",
    layer_groups=True,
    tiers=True,
    layout="kvferry.cache.layouts:grouped_layout",
    requires=("torch",),
    install="pip install 'kvferry[torch]'",
)


@hookimpl
def kv_cache_managers() -> tuple[ManagerKind, ...]:
    """Declare the manager of layer groups."""
    return (_KIND,)


@hookimpl
def create_kv_cache_manager(spec: ManagerSpec) -> KVCacheManager:
    """Build the manager; imports torch here."""
    from kvferry.cache.manager_v2 import KVCacheManagerV2

    return KVCacheManagerV2(spec)
