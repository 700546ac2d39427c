import json

import pytest

from kvferry.checkpoint import load_model_spec, model_geometry
from kvferry.testing.tiny_checkpoints import TINY_MODELS
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape, RoleShape

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def checkpoint(tmp_path):
    def write(text: str):
        (tmp_path / "config.json").write_text(text)
        return tmp_path

    return write


def test_a_folder_and_its_config_are_the_same_checkpoint(checkpoint):
    folder = checkpoint(json.dumps(SMOLLM2))
    spec = load_model_spec(folder)
    assert spec == load_model_spec(str(folder / "config.json"))
    assert spec.architecture == "LlamaForCausalLM"
    assert spec.pretrained_config["hidden_size"] == 576


def test_the_config_is_immutable_to_the_bottom(checkpoint):
    spec = load_model_spec(checkpoint(json.dumps({"architectures": ["A"], "rope": {"factors": [1]}})))
    with pytest.raises(TypeError):
        spec.pretrained_config["rope"]["factors"] = 2
    assert spec.pretrained_config["rope"]["factors"] == (1,)


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": []}])
def test_a_checkpoint_that_names_no_architecture_is_no_error(checkpoint, config):
    spec = load_model_spec(checkpoint(json.dumps(config)))
    assert spec.architecture is None
    assert set(spec.pretrained_config) == set(config)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "no valid JSON"),
        ("[1]", "holds list"),
        ('{"architectures": "A"}', "list of names"),
        ("", "no valid JSON"),
        ("[" * 100_000, "no valid JSON"),
        ('{"architectures": [1]}', "list of names"),
    ],
    ids=lambda value: value[:20],
)
def test_a_checkpoint_that_cannot_be_understood_names_its_file(checkpoint, text, word):
    folder = checkpoint(text)
    with pytest.raises(ConfigError, match=word) as raised:
        load_model_spec(folder)
    assert str(folder / "config.json") in str(raised.value)


def test_a_checkpoint_that_is_not_there_says_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match=r"folder with a config\.json"):
        load_model_spec(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        load_model_spec(tmp_path)


def test_the_geometry_follows_transformers_fallbacks():
    geometry = model_geometry(SMOLLM2)
    assert (geometry.num_layers, geometry.kv_heads, geometry.head_dim, geometry.dtype) == (30, 3, 64, "bfloat16")
    assert geometry.windows == (None,) * 30
    without = {key: value for key, value in SMOLLM2.items() if key not in ("num_key_value_heads", "torch_dtype")}
    geometry = model_geometry({**without, "head_dim": 80, "num_key_value_heads": None})
    assert (geometry.kv_heads, geometry.head_dim, geometry.dtype) == (9, 80, "float32")


def test_a_wish_for_a_dtype_comes_before_the_checkpoints():
    assert model_geometry(SMOLLM2, "float16").dtype == "float16"
    assert model_geometry({**SMOLLM2, "dtype": "torch.float64"}).dtype == "float64"


def test_the_language_model_of_a_multimodal_checkpoint_counts():
    geometry = model_geometry(
        {"text_config": {**SMOLLM2, "torch_dtype": None}, "dtype": "float16", "num_hidden_layers": 2}
    )
    assert (geometry.num_layers, geometry.dtype) == (30, "float16")


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}, (512, None)),
        ({"layer_types": ["full_attention", "full_attention"], "sliding_window": 512}, (None, None)),
        ({"sliding_window": 512}, (512, 512)),
        ({"sliding_window": 512, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}, (None, 512)),
        ({"sliding_window": 512, "sliding_window_pattern": 2}, (512, None)),
        ({"sliding_window": 512, "model_type": "gemma2"}, (512, None)),
        ({"sliding_window": None}, (None, None)),
    ],
)
def test_each_layer_has_its_window(fields, windows):
    assert model_geometry({**SMOLLM2, "num_hidden_layers": 2, **fields}).windows == windows


def test_the_configured_windows_repeat_over_the_layers_and_narrow_them():
    config = {
        **SMOLLM2,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "sliding_window": 512,
    }
    assert model_geometry(config, max_attention_window=[1024, 256]).windows == (512, 256, 1024)


def test_the_geometry_agrees_with_transformers_own():
    from transformers import (
        Cohere2Config,
        Gemma2Config,
        Gemma3TextConfig,
        GptOssConfig,
        LlamaConfig,
        MistralConfig,
        Olmo3Config,
        Qwen2Config,
    )

    slide, full = "sliding_attention", "full_attention"
    configs = [
        (LlamaConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, hidden_size=128), [full] * 2),
        (Gemma3TextConfig(num_hidden_layers=7, sliding_window=64), [slide] * 5 + [full, slide]),
        (MistralConfig(num_hidden_layers=2, sliding_window=64), [slide] * 2),
        (
            Qwen2Config(num_hidden_layers=3, use_sliding_window=True, sliding_window=64, max_window_layers=2),
            [full, full, slide],
        ),
    ]
    for made in (Cohere2Config, Gemma2Config, GptOssConfig, Olmo3Config):
        config = made(num_hidden_layers=9, sliding_window=64)
        assert set(config.layer_types) == {slide, full}
        configs.append((config, config.layer_types))
    for config, kinds in configs:
        without = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
        assert model_geometry(without).windows == tuple(64 if kind == slide else None for kind in kinds)
        geometry = model_geometry(json.loads(config.to_json_string(use_diff=False)))
        assert geometry.kv_heads == config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        assert geometry.head_dim == head_dim
        assert geometry.windows == tuple(64 if kind == slide else None for kind in kinds)


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": "9"}, "num_attention_heads"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"], "sliding_window": 4}, "layer_types"),
    ],
)
def test_a_config_that_does_not_say_the_shape_names_the_field(fields, setting):
    with pytest.raises(ConfigError, match=setting) as raised:
        model_geometry({**SMOLLM2, **fields})
    assert raised.value.setting == setting


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64}


def test_of_mla_one_latent_row_is_kept_and_its_geometry_says_so():
    geometry = model_geometry({**SMOLLM2, **LATENT})
    assert (geometry.kv_heads, geometry.head_dim) == (1, 576)
    assert geometry.layers == (LayerShape((RoleShape("latent", 1, 576),), "latent"),) * 30


def test_values_of_another_width_than_keys_are_described_layer_by_layer():
    geometry = model_geometry({**SMOLLM2, "head_dim": 192, "v_head_dim": 128})
    roles = (RoleShape("key", 3, 192), RoleShape("value", 3, 128))
    assert geometry.layers == (LayerShape(roles),) * 30
    assert model_geometry({**SMOLLM2, "v_head_dim": 64}).layers == ()


@pytest.mark.parametrize(
    ("fields", "roles", "stateful"),
    [
        (
            {
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4,
            },
            {"conv": (2 * 16 + 32) * 128 * 4, "recurrent": 32 * 128 * 128},
            [True, True, True, False],
        ),
        (
            {
                "linear_attn_config": {
                    "full_attn_layers": [4],
                    "kda_layers": [1, 2, 3],
                    "num_heads": 32,
                    "head_dim": 128,
                }
            },
            {"conv": 3 * 32 * 128 * 4, "recurrent": 32 * 128 * 128},
            [True, True, True, False],
        ),
        ({"conv_L_cache": 3, "full_attn_idxs": [2]}, {"conv": 3 * 576}, [True, True, False, True]),
        (
            {"conv_L_cache": 3, "layer_types": ["full_attention", "conv", "conv", "conv"]},
            {"conv": 3 * 576},
            [False, True, True, True],
        ),
    ],
    ids=["Qwen3-Next", "Kimi Linear", "LFM2", "LFM2 with layer types"],
)
def test_a_hybrid_says_which_layers_keep_a_state_and_how_large(fields, roles, stateful):
    geometry = model_geometry({**SMOLLM2, "num_hidden_layers": 4, **fields}, max_attention_window=[1024])
    assert [shape.kind == "state" for shape in geometry.layers] == stateful
    state = geometry.layers[stateful.index(True)]
    assert {role.name: role.heads * role.width for role in state.roles} == roles
    assert {role.name: role.dtype for role in state.roles}.items() <= {"conv": None, "recurrent": "float32"}.items()
    assert geometry.windows == tuple(None if kept else 1024 for kept in stateful)
    assert (geometry.kv_heads, geometry.head_dim) == (3, 64)


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"hybrid_override_pattern": "M*M*"}, "hybrid_override_pattern"),
        ({"index_head_dim": 128, **LATENT}, "index_head_dim"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"layer_types": ["compressed_sparse_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({**LATENT, "qk_rope_head_dim": None}, "qk_rope_head_dim"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layers_that_we_do_not_know_are_refused_and_not_taken_for_attention(fields, setting):
    with pytest.raises(ConfigError, match=setting) as raised:
        model_geometry({**SMOLLM2, "num_hidden_layers": 4, **fields})
    assert raised.value.setting == setting


def test_the_geometry_is_that_of_transformers_own_caches(tiny_checkpoint):
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    for name in TINY_MODELS:
        folder = tiny_checkpoint(name)
        geometry = model_geometry(load_model_spec(folder).pretrained_config)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(torch.zeros((1, 1), dtype=torch.int64), cache=cache, use_cache=True)
        for position, layer in enumerate(cache.layers):
            shape = geometry.shape(position)
            if shape.kind == "state":
                kept = [state[0] for state in (layer.conv_states, layer.recurrent_states) if state[0] is not None]
            else:
                kept = [layer.keys, layer.values]
            assert sum(tensor.numel() for tensor in kept) == sum(role.heads * role.width for role in shape.roles)
            assert (getattr(layer, "sliding_window", None)) == shape.window
