"""Whether transformers caches, layer by layer, what was made of the checkpoint's ``config.json``."""

from pathlib import Path
from typing import Any

from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import ModelGeometry


def require_same_layers(model: Any, geometry: ModelGeometry, folder: Path) -> None:
    """Refuse a model whose layers see more than its geometry says, or keep something else.

    A configuration leaves much to the defaults of its class; what was understood otherwise would read blocks that are
    not there.

    Args:
        model: as transformers loaded it.
        geometry: derived from ``config.json`` alone.
        folder: the checkpoint's, for the message.

    Raises:
        ConfigError: with the layer and both views of it.
    """
    from transformers import DynamicCache

    layers = DynamicCache(config=model.config).layers
    if len(layers) != geometry.num_layers:
        raise _differs(folder, f"{len(layers)} layers", f"{geometry.num_layers}")
    for position, layer in enumerate(layers):
        shape = geometry.shape(position)
        theirs, ours = _kind(layer), "a state" if shape.kind == "state" else "tokens"
        if theirs != ours:
            raise _differs(folder, f"{theirs} for layer {position}", ours)
        window = _window(layer)
        if shape.window is not None and (window is None or window > shape.window):
            seen = "all tokens" if window is None else f"a window of {window}"
            raise _differs(folder, f"{seen} for layer {position}", f"a window of {shape.window}")


def _kind(layer: Any) -> str:
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

    keeps_state, keeps_tokens = isinstance(layer, LinearAttentionCacheLayerMixin), isinstance(layer, CacheLayerMixin)
    if keeps_state and keeps_tokens:
        return "a state and tokens"
    if keeps_state:
        return "a state"
    return "tokens" if keeps_tokens else "nothing"


def _window(layer: Any) -> int | None:
    window = getattr(layer, "sliding_window", None)
    return int(window) if window is not None else None


def _differs(folder: Path, theirs: str, ours: str) -> ConfigError:
    return ConfigError(
        f"transformers keeps {theirs} of the checkpoint {folder}, but its config.json was understood as {ours}; write "
        "the field that the model's class fills in by default (mostly 'layer_types') into config.json",
        setting="layer_types",
    )
