"""Whether a manager keeps what a model's layers need."""

from kvferry.integrations.transformers.loading import LoadedModel
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.layout import KvLayout, LayerGroup, RoleView
from kvferry_plugins.types import LayerShape

MANAGER = "kv_cache_config.use_kv_cache_manager_v2"
WINDOWS = "kv_cache_config.max_attention_window"
_KEPT = {"attention": "keys and values", "latent": "one latent row a token", "state": "a state of fixed size"}


def require_kept(loaded: LoadedModel, layout: KvLayout, kind: str) -> None:
    """Refuse a manager of another geometry, or one that forgets what attention still sees.

    Args:
        loaded: the model.
        layout: the manager's.
        kind: the manager's name.

    Raises:
        ConfigError: with what it keeps and what is needed.
    """
    geometry = loaded.geometry
    have, want = sum(len(group.layers) for group in layout.groups), geometry.num_layers
    if (have, layout.dtype) != (want, geometry.dtype):
        raise ConfigError(
            f"the manager {kind} keeps {have} layers in {layout.dtype}, but the model {loaded.path.name} has {want} in "
            f"{geometry.dtype}; build it with the model's own geometry"
        )
    for position in range(geometry.num_layers):
        layer = geometry.first_layer + position
        group = layout.groups[layout.group_of(layer)]
        shape = geometry.shape(position)
        _require_kind(layer, group, shape, kind)
        _require_roles(layer, _views(layout, group, layer), _wanted(shape, layout.dtype), kind)
        _require_window(layer, group, shape, loaded.max_tokens)


def _views(layout: KvLayout, group: LayerGroup, layer: int) -> list[RoleView]:
    return [view for pool in group.pools for view in layout.pools[pool].views if view.layer == layer]


def _wanted(shape: LayerShape, dtype: str) -> list[tuple[str, int, int]]:
    import torch

    return sorted(
        (role.name, role.heads, role.width * getattr(torch, role.dtype or dtype).itemsize) for role in shape.roles
    )


def _require_kind(layer: int, group: LayerGroup, shape: LayerShape, kind: str) -> None:
    if group.kind != shape.kind:
        raise ConfigError(
            f"layer {layer} keeps {_KEPT[shape.kind]}, for which the manager {kind} has no room; set {MANAGER}: true",
            setting=MANAGER,
        )


def _require_roles(layer: int, views: list[RoleView], want: list[tuple[str, int, int]], kind: str) -> None:
    have = sorted((view.role, view.heads, view.row_bytes) for view in views)
    if have != want:
        raise ConfigError(
            f"the manager {kind} keeps {have} (role, heads, bytes a head) of layer {layer}, but the model has {want}; "
            "build it with the model's own geometry"
        )


def _require_window(layer: int, group: LayerGroup, shape: LayerShape, max_tokens: int | None) -> None:
    seen = max_tokens if shape.window is None else shape.window
    if group.window is not None and (seen is None or group.window < seen):
        raise ConfigError(
            f"a window of {group.window} tokens is configured for layer {layer}, whose attention sees "
            f"{'all' if seen is None else seen}: the transformers engine cannot narrow what a model sees; leave "
            f"{WINDOWS} out, or raise it",
            setting=WINDOWS,
        )
