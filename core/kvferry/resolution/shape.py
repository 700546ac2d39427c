"""What resolution knows of a model's KV cache, and which managers can hold it."""

import contextlib

from kvferry.checkpoint import ModelSpec, model_geometry
from kvferry_plugins.types import ManagerKind, ModelGeometry


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
    odd = geometry.odd_layer()
    if odd is None:
        return None
    shape = geometry.shape(odd)
    kept = ", ".join(role.name for role in shape.roles)
    return f"it holds keys and values of equal layers only, but layer {odd} keeps {kept} ({shape.kind})"
