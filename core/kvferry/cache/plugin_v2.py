"""Declares KV-cache manager V2, which is not there yet: resolution answers as ever, building says so."""

from kvferry_plugins import hookimpl
from kvferry_plugins.errors import BackendUnavailableError
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.types import ManagerKind, ManagerSpec

_KIND = ManagerKind(
    name="V2",
    class_name="KVCacheManagerV2",
    layer_groups=True,
    requires=("torch",),
    install="pip install 'kvferry[torch]'",
)


@hookimpl
def kv_cache_managers() -> tuple[ManagerKind, ...]:
    """Declare the manager of layer groups."""
    return (_KIND,)


@hookimpl
def create_kv_cache_manager(spec: ManagerSpec) -> KVCacheManager:
    """Refuse. Raises BackendUnavailableError."""
    raise BackendUnavailableError(
        f"KV-cache manager {spec.kind} is not there yet: set kv_cache_config.use_kv_cache_manager_v2 to false"
    )
