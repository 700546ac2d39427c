"""What our managers' blocks look like, planned from a specification alone: pure, without torch and without memory."""

from kvferry.cache.item_bytes import item_bytes
from kvferry.cache.layer_groups import GroupShape, group_shapes
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.layout import KvLayout, LayerGroup, Pool, dense_pool
from kvferry_plugins.types import ManagerSpec, ModelGeometry


def uniform_layout(spec: ManagerSpec) -> KvLayout:
    """Plan ``KVCacheManagerV1``: all layers in one group and one pool; no blocks yet, at address 0.

    Raises:
        ConfigError: an unknown dtype, or a layer that keeps something else than the others.
    """
    _require_one_shape(spec.geometry)
    return KvLayout(spec.geometry.dtype, (_group(spec),), (_pool(spec),))


def grouped_layout(spec: ManagerSpec) -> KvLayout:
    """Plan ``KVCacheManagerV2``: a pool a group of layers; no blocks yet, at address 0.

    Raises:
        ConfigError: an unknown dtype, or a window of less than one token.
    """
    shapes = group_shapes(spec.geometry, spec.tokens_per_block)
    pools = tuple(Pool(0, shape.block_stride, 0, shape.views, spec.device) for shape in shapes)
    return layout_of_groups(spec, shapes, pools)


def layout_of_groups(spec: ManagerSpec, shapes: tuple[GroupShape, ...], pools: tuple[Pool, ...]) -> KvLayout:
    """Join the groups and their pools, one each."""
    return KvLayout(spec.geometry.dtype, tuple(shape.group for shape in shapes), pools)


def _require_one_shape(geometry: ModelGeometry) -> None:
    odd = geometry.odd_layer()
    if odd is not None:
        shape = geometry.shape(odd)
        raise ConfigError(
            "KVCacheManagerV1 holds keys and values of equal layers only, but layer "
            f"{geometry.first_layer + odd} keeps {', '.join(role.name for role in shape.roles)} "
            f"({shape.kind}); set kv_cache_config.use_kv_cache_manager_v2: true",
            setting="kv_cache_config.use_kv_cache_manager_v2",
        )


def _group(spec: ManagerSpec) -> LayerGroup:
    geometry = spec.geometry
    return LayerGroup(
        layers=_layers(geometry),
        pools=(0,),
        tokens_per_block=spec.tokens_per_block,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        head_start=geometry.shape(0).head_start,
        total_heads=geometry.shape(0).total_heads,
    )


def _pool(spec: ManagerSpec) -> Pool:
    return dense_pool(
        layers=_layers(spec.geometry),
        kv_heads=spec.geometry.kv_heads,
        head_dim=spec.geometry.head_dim,
        tokens_per_block=spec.tokens_per_block,
        item_bytes=item_bytes(spec.geometry.dtype),
        num_blocks=0,
        device=spec.device,
    )


def _layers(geometry: ModelGeometry) -> tuple[int, ...]:
    return tuple(range(geometry.first_layer, geometry.first_layer + geometry.num_layers))
