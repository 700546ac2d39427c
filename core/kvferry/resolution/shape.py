"""What resolution knows of a model's KV cache, and which managers can hold it."""

import contextlib

from kvferry.checkpoint import ModelSpec, model_geometry
from kvferry_plugins.types import ManagerKind, ModelGeometry, RoleShape


def known_geometry(model: ModelSpec | None) -> ModelGeometry | None:
    """The model's shape, or None: a checkpoint whose shape cannot be read is the build's business."""
    if model is None or model.pretrained_config is None:
        return None
    with contextlib.suppress(ValueError):
        return model_geometry(model.pretrained_config)
    return None


def cannot_hold(kind: ManagerKind, geometry: ModelGeometry | None) -> str | None:
    """Say which layer a manager of one uniform pool has no place for; None where there is none, or nobody knows."""
    if kind.layer_groups or geometry is None:
        return None
    usual = tuple(RoleShape(name, geometry.kv_heads, geometry.head_dim) for name in ("key", "value"))
    for position in range(geometry.num_layers):
        shape = geometry.shape(position)
        if (shape.kind, shape.roles) != ("attention", usual):
            kept = ", ".join(role.name for role in shape.roles)
            return f"it holds keys and values of equal layers only, but layer {position} keeps {kept} ({shape.kind})"
    return None
