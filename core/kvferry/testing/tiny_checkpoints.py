"""Checkpoints of a few hundred kilobytes with random weights: every kind of cache that a model can have, in seconds."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SEED = 7
WINDOW = 24
"""Tokens that the sliding layers see: small, so that a short prompt slides."""
_COMMON: Mapping[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}


def _llama(transformers: Any) -> Any:
    return transformers.LlamaConfig(**_COMMON)


def _gemma3(transformers: Any) -> Any:
    types = [_SLIDING, _SLIDING, _FULL, _SLIDING]
    return transformers.Gemma3TextConfig(**_COMMON, head_dim=8, sliding_window=WINDOW, layer_types=types)


def _gpt_oss(transformers: Any) -> Any:
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    types = [_SLIDING, _FULL] * 2
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 512}
    return transformers.GptOssConfig(
        **_COMMON, **fields, sliding_window=WINDOW, layer_types=types, rope_parameters=rope
    )


def _deepseek_v3(transformers: Any) -> Any:
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "num_nextn_predict_layers": 0}
    return transformers.DeepseekV3Config(**{**_COMMON, **_MLA, **experts})


def _kimi_linear(transformers: Any) -> Any:
    linear = {"linear_head_dim": 8, "linear_num_heads": 2, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]}
    return transformers.KimiLinearConfig(**{**_COMMON, **_MLA, **linear, "num_local_experts": 4})


def _qwen3_next(transformers: Any) -> Any:
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3NextConfig(**_COMMON, **linear, **experts, shared_expert_intermediate_size=16, head_dim=8)


def _lfm2(transformers: Any) -> Any:
    return transformers.Lfm2Config(
        **_COMMON, layer_types=["conv", _FULL, "conv", _FULL], block_auto_adjust_ff_dim=False
    )


_CONFIGS: Mapping[str, Callable[[Any], Any]] = {
    "deepseek_v3": _deepseek_v3,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "llama": _llama,
    "qwen3_next": _qwen3_next,
}
TINY_MODELS = tuple(_CONFIGS)
"""What ``write_tiny_checkpoint`` knows: plain and windowed attention, with sinks, latents, states, and both."""


def write_tiny_checkpoint(name: str, folder: Path) -> Path:
    """Write a model that transformers can load, the same bytes at every call, and a tokenizer of bytes.

    Needs transformers, safetensors and torch (``pip install 'kvferry[serve]'``).

    Args:
        name: one of ``TINY_MODELS``.
        folder: made where missing.

    Returns:
        ``folder``.

    Raises:
        KeyError: there is no such model.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = _CONFIGS[name](transformers)
    model = _random_model(transformers, config)
    model.save_pretrained(folder)
    _byte_tokenizer(transformers).save_pretrained(folder)
    return folder


def _random_model(transformers: Any, config: Any) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Wide enough that the output depends on the whole prompt; what is one-dimensional (norms, decays, sinks)
            # stays near what the model's own initialisation says.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter.data, std=0.4 if "embed" in name or "lm_head" in name else 0.25)
            else:
                parameter.data.nan_to_num_().add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def _byte_tokenizer(transformers: Any) -> Any:
    import tokenizers

    names = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
