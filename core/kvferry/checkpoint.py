"""A checkpoint's ``config.json``: which model it names, and the shape of its KV cache."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.registry.freezing import freeze
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import ModelGeometry

CONFIG_NAME = "config.json"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What is known of a model before it is loaded."""

    architecture: str | None
    """The first entry of ``architectures``, or None: then no model has an opinion."""
    pretrained_config: Mapping[str, Any] | None = None
    """``config.json`` as read, immutable; None when only a name is known."""
    path: Path | None = None
    """Of the ``config.json``."""


def load_model_spec(path: str | os.PathLike[str]) -> ModelSpec:
    """Read a folder with a ``config.json``, or that file.

    Raises:
        ConfigError: it is missing or unreadable, or holds no JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / CONFIG_NAME
    config = _read_object(file)
    return ModelSpec(_first_architecture(config, file), freeze(config), file)


def model_geometry(
    pretrained_config: Mapping[str, Any],
    dtype: str = "auto",
    *,
    max_attention_window: Sequence[int] | None = None,
) -> ModelGeometry:
    """Derive the shape of a model's KV cache, for a whole model on one rank.

    The language model of a multimodal checkpoint (``text_config``) counts. Missing fields fall back as transformers'
    own configurations do: ``num_key_value_heads`` to ``num_attention_heads``, ``head_dim`` to ``hidden_size`` divided
    by the heads, ``dtype`` to ``float32``.

    Args:
        pretrained_config: ``config.json`` as read.
        dtype: torch's name without the module; ``auto`` = the checkpoint's.
        max_attention_window: ``kv_cache_config.max_attention_window``: windows in tokens, repeated over the layers;
            a layer keeps the smaller of its own window and this one.

    Raises:
        ConfigError: a field is missing and has no fallback, or holds no positive integer.
    """
    text = _language_model(pretrained_config)
    layers = _positive(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = _positive(text, "num_attention_heads", "n_head")
    kv_heads = _positive(text, "num_key_value_heads", "num_kv_heads", default=heads)
    head_dim = _optional(text, "head_dim") or _positive(text, "hidden_size", "n_embd") // heads
    return ModelGeometry(
        num_layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=_dtype(text, pretrained_config) if dtype == "auto" else dtype,
        windows=_narrowed(_windows(text, layers), max_attention_window),
    )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the checkpoint's {file}: {error.strerror or error}; "
            f"--model takes a folder with a {CONFIG_NAME}, or that file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the checkpoint's {file} is no valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"the checkpoint's {file} should hold a JSON object, but holds {type(config).__name__}")
    return config


def _first_architecture(config: Mapping[str, Any], file: Path) -> str | None:
    architectures = config.get("architectures")
    if not architectures:
        return None
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ConfigError(
            f"'architectures' in the checkpoint's {file} should be a list of names, but is {architectures!r}",
            setting="architectures",
        )
    return architectures[0] or None


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return nested
    return config


def _optional(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of the fields that holds something; null counts as missing."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name!r} in {CONFIG_NAME} should be an integer > 0, but is {value!r}", setting=name)
        return value
    return None


def _positive(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    value = _optional(config, *names)
    if value is not None:
        return value
    if default is None:
        raise ConfigError(
            f"{CONFIG_NAME} does not say {names[0]!r}, which the KV cache's shape needs; it says: "
            f"{', '.join(sorted(config)) or 'nothing'}",
            setting=names[0],
        )
    return default


def _dtype(*configs: Mapping[str, Any]) -> str:
    """Return the load dtype; newer checkpoints say ``dtype``, older ones ``torch_dtype``."""
    for config in configs:
        for name in ("dtype", "torch_dtype"):
            value = config.get(name)
            if isinstance(value, str) and value != "auto":
                return value.removeprefix("torch.")
    return "float32"


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return each layer's sliding window, from ``layer_types`` or the older pattern, or None for full attention."""
    window = _optional(config, "sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if _slides(kind) else None for kind in _one_a_layer(kinds, layers))
    period = _optional(config, "sliding_window_pattern", "_sliding_window_pattern")
    if period is not None:
        return tuple(window if (layer + 1) % period else None for layer in range(layers))
    if config.get("use_sliding_window") is True:
        full = _optional(config, "max_window_layers") if config.get("max_window_layers") else 0
        return tuple(window if layer >= (full or 0) else None for layer in range(layers))
    return (window,) * layers


def _slides(kind: object) -> bool:
    return kind == "sliding_attention"


def _one_a_layer(kinds: object, layers: int) -> Sequence[object]:
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list | tuple) else "no list"
        raise ConfigError(
            f"'layer_types' in {CONFIG_NAME} should name {layers} layers, but holds {count}", setting="layer_types"
        )
    return kinds


def _narrowed(windows: tuple[int | None, ...], pattern: Sequence[int] | None) -> tuple[int | None, ...]:
    if not pattern:
        return windows
    limits = (pattern[layer % len(pattern)] for layer in range(len(windows)))
    return tuple(limit if window is None else min(window, limit) for window, limit in zip(windows, limits, strict=True))
