"""A checkpoint's ``config.json``: which model it names, and the shape of its KV cache."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvferry.layer_shapes import layer_shapes
from kvferry.pretrained_fields import CONFIG_NAME, positive
from kvferry.registry.freezing import freeze
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape, ModelGeometry


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
    by the heads, ``v_head_dim`` to ``head_dim``, ``dtype`` to ``float32``.

    Args:
        pretrained_config: ``config.json`` as read.
        dtype: torch's name without the module; ``auto`` = the checkpoint's.
        max_attention_window: ``kv_cache_config.max_attention_window``: windows in tokens, repeated over the layers;
            a layer keeps the smaller of its own window and this one.

    Returns:
        The geometry; ``layers`` is empty where every layer keeps keys and values of one width.

    Raises:
        ConfigError: a field is missing and has no fallback, holds no positive integer, or names a kind of layer whose
            cache kvferry does not know.
    """
    text = language_model(pretrained_config)
    layers = positive(text, "num_hidden_layers", "n_layer", "num_layers")
    shapes = _narrowed(layer_shapes(text, layers), max_attention_window)
    tokens = next((shape for shape in shapes if shape.kind != "state"), shapes[0])
    return ModelGeometry(
        num_layers=layers,
        kv_heads=tokens.roles[0].heads,
        head_dim=tokens.roles[0].width,
        dtype=_dtype(text, pretrained_config) if dtype == "auto" else dtype,
        windows=tuple(shape.window for shape in shapes),
        layers=() if all(_is_plain(shape, tokens) for shape in shapes) else shapes,
    )


def _is_plain(shape: LayerShape, first: LayerShape) -> bool:
    """Whether a layer keeps keys and values as ``ModelGeometry`` alone describes them."""
    return shape.kind == "attention" and shape.roles == first.roles and len({role.width for role in shape.roles}) == 1


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


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a ``config.json`` that describes the language model: of a multimodal checkpoint a section of it."""
    for name in ("text_config", "llm_config", "language_config"):
        nested = config.get(name)
        if isinstance(nested, Mapping):
            return nested
    return config


def _dtype(*configs: Mapping[str, Any]) -> str:
    """Return the load dtype; newer checkpoints say ``dtype``, older ones ``torch_dtype``."""
    for config in configs:
        for name in ("dtype", "torch_dtype"):
            value = config.get(name)
            if isinstance(value, str) and value != "auto":
                return value.removeprefix("torch.")
    return "float32"


def _narrowed(shapes: tuple[LayerShape, ...], pattern: Sequence[int] | None) -> tuple[LayerShape, ...]:
    if not pattern:
        return shapes
    limits = (pattern[layer % len(pattern)] for layer in range(len(shapes)))
    return tuple(
        shape if shape.kind == "state" else replace(shape, window=min(limit, shape.window or limit))
        for shape, limit in zip(shapes, limits, strict=True)
    )
