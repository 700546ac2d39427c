"""Declares KV-cache manager V1; the manager itself is imported when one is built."""

from kvferry_plugins import hookimpl
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.types import ManagerKind, ManagerSpec

_KIND = ManagerKind(
    name="V1",
    class_name="KVCacheManagerV1",
    layout="kvferry.cache.layouts:uniform_layout",
    requires=("torch",),
    install="pip install 'kvferry[torch]'",
)


@hookimpl
def kv_cache_managers() -> tuple[ManagerKind, ...]:
    """Declare the manager of one uniform pool."""
    return (_KIND,)


@hookimpl
def create_kv_cache_manager(spec: ManagerSpec) -> KVCacheManager:
    """Build the manager; imports torch here."""
    from kvferry.cache.manager_v1 import KVCacheManagerV1

    return KVCacheManagerV1(spec)
