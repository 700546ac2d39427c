"""What each layer of a model keeps of a sequence, from the model's ``config.json``.

The shapes are those of transformers' own caches (5.24: ``cache_utils.py`` and the models' ``modeling_*.py``), read on
2026-11-30. MLA keeps the compressed row and the rotated part of the key, not the keys and values that come of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvferry.pretrained_fields import CONFIG_NAME, one_a_layer, optional, positive
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape, RoleShape

_FULL = frozenset({"full_attention", "attention", "chunked_attention"})
"""A chunked layer (Llama 4) may see its whole chunk: it keeps everything here."""
_SLIDING = "sliding_attention"
_PERIODS = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4, "vaultgemma": 2}
"""Of ``model_type``: every so many layers one sees everything, where the configuration does not say which."""
_STATE = frozenset({"linear_attention", "conv"})
_UNKNOWN = (
    "attn_layer_indices",
    "attn_layer_period",
    "block_types",
    "compress_ratios",
    "global_head_dim",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "index_head_dim",
    "layers_block_type",
    "mamba_d_state",
    "num_kv_shared_layers",
    "state_size",
    "swa_head_dim",
)
"""Fields of models whose layers keep what is not described here: taking them for plain attention would be wrong."""


def layer_shapes(text: Mapping[str, Any], layers: int) -> tuple[LayerShape, ...]:
    """Derive the shape of every layer, for a whole model on one rank.

    Args:
        text: the language model's part of ``config.json``.
        layers: how many there are.

    Raises:
        ConfigError: a field is missing or holds no positive integer, or a layer is of a kind that we do not know.
    """
    unknown = [name for name in _UNKNOWN if text.get(name)]
    if unknown:
        raise ConfigError(
            f"{CONFIG_NAME} says {unknown[0]!r}: its layers keep something else than attention, latents or states of "
            "the models that kvferry knows, so the KV cache's shape cannot be derived",
            setting=unknown[0],
        )
    kinds = _kinds(text, layers)
    token = _latent if optional(text, "kv_lora_rank") else _attention
    shapes: dict[str, Callable[[], LayerShape]] = {
        **dict.fromkeys(_FULL, lambda: token(text)),
        _SLIDING: lambda: replace(token(text), window=positive(text, "sliding_window")),
        **dict.fromkeys(_STATE, lambda: _state(text)),
    }
    known = {kind: shapes[kind]() for kind in dict.fromkeys(kinds) if kind in shapes}
    for layer, kind in enumerate(kinds):
        if kind not in known:
            raise ConfigError(
                f"'layer_types' in {CONFIG_NAME} says {kind!r} of layer {layer}, but kvferry knows only "
                f"{', '.join(sorted(shapes))}",
                setting="layer_types",
            )
    return tuple(known[kind] for kind in kinds)


def _attention(text: Mapping[str, Any]) -> LayerShape:
    heads = positive(text, "num_attention_heads", "n_head")
    kv_heads = positive(text, "num_key_value_heads", "num_kv_heads", default=heads)
    head_dim = optional(text, "head_dim") or positive(text, "hidden_size", "n_embd") // heads
    value_dim = positive(text, "v_head_dim", default=head_dim)
    return LayerShape((RoleShape("key", kv_heads, head_dim), RoleShape("value", kv_heads, value_dim)))


def _latent(text: Mapping[str, Any]) -> LayerShape:
    width = positive(text, "kv_lora_rank") + positive(text, "qk_rope_head_dim")
    return LayerShape((RoleShape("latent", 1, width),), kind="latent")


def _state(text: Mapping[str, Any]) -> LayerShape:
    """One layer's states. They are one head: no rank keeps a part of them."""
    kimi = text.get("linear_attn_config")
    if isinstance(kimi, Mapping) or optional(text, "linear_num_heads"):
        return _kimi_delta(text, kimi if isinstance(kimi, Mapping) else {})
    if optional(text, "linear_num_value_heads"):
        return _gated_delta(text)
    if optional(text, "conv_L_cache"):
        return _states(positive(text, "hidden_size") * positive(text, "conv_L_cache"))
    raise ConfigError(
        f"'layer_types' in {CONFIG_NAME} name layers that keep a state, but it has not the fields of one that kvferry "
        "knows (Qwen3-Next's linear_num_value_heads, Kimi Linear's linear_attn_config, LFM2's conv_L_cache)",
        setting="layer_types",
    )


def _gated_delta(text: Mapping[str, Any]) -> LayerShape:
    """Qwen3-Next and its successors: the convolution's last inputs, and a matrix a value head."""
    keys, key_width = positive(text, "linear_num_key_heads"), positive(text, "linear_key_head_dim")
    values, value_width = positive(text, "linear_num_value_heads"), positive(text, "linear_value_head_dim")
    channels = 2 * keys * key_width + values * value_width
    return _states(channels * positive(text, "linear_conv_kernel_dim"), values * key_width * value_width)


def _kimi_delta(text: Mapping[str, Any], nested: Mapping[str, Any]) -> LayerShape:
    heads = optional(nested, "num_heads") or positive(text, "linear_num_heads", default=32)
    width = optional(nested, "head_dim") or positive(text, "linear_head_dim", default=128)
    kernel = optional(nested, "short_conv_kernel_size") or positive(text, "linear_conv_kernel_dim", default=4)
    return _states(3 * heads * width * kernel, heads * width * width)


def _states(convolution: int, recurrent: int = 0) -> LayerShape:
    roles = [RoleShape("conv", 1, convolution)]
    if recurrent:
        roles.append(RoleShape("recurrent", 1, recurrent, dtype="float32"))
    return LayerShape(tuple(roles), kind="state")


def _kinds(text: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Each layer's kind in transformers' words, from ``layer_types`` or what older configurations say instead."""
    slides = optional(text, "sliding_window") is not None and text.get("use_sliding_window") is not False
    kinds = text.get("layer_types")
    if kinds is not None:
        named = [str(kind) for kind in one_a_layer(kinds, "layer_types", layers)]
        return [kind if slides or kind != _SLIDING else "full_attention" for kind in named]
    hybrid = _hybrid(text, layers)
    if hybrid is not None:
        return ["full_attention" if full else "linear_attention" for full in hybrid]
    return [_SLIDING if slides and slid else "full_attention" for slid in _slid(text, layers)]


def _hybrid(text: Mapping[str, Any], layers: int) -> list[bool] | None:
    """Which layers of a hybrid without ``layer_types`` have full attention; None if it is no hybrid."""
    kimi = text.get("linear_attn_config")
    if isinstance(kimi, Mapping) and kimi.get("full_attn_layers"):
        return [layer + 1 in kimi["full_attn_layers"] for layer in range(layers)]
    if optional(text, "linear_num_value_heads"):
        period = positive(text, "full_attention_interval", default=4)
        return [(layer + 1) % period == 0 for layer in range(layers)]
    if optional(text, "conv_L_cache"):
        full = text.get("full_attn_idxs")
        return [full is None or layer in full for layer in range(layers)]
    return None


def _slid(text: Mapping[str, Any], layers: int) -> list[bool]:
    period = optional(text, "sliding_window_pattern", "_sliding_window_pattern")
    period = period or _PERIODS.get(str(text.get("model_type")))
    if period is not None:
        return [(layer + 1) % period != 0 for layer in range(layers)]
    if text.get("use_sliding_window") is True:
        full = optional(text, "max_window_layers") if text.get("max_window_layers") else 0
        return [layer >= (full or 0) for layer in range(layers)]
    return [True] * layers
