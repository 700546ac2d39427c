import json

import pytest

from kvferry.checkpoint import load_model_spec, model_geometry
from kvferry_plugins.errors import ConfigError

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
    from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config

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
    for config, kinds in configs:
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
