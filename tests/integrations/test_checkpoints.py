import threading
from pathlib import Path

import numpy as np
import pytest

from kvferry.integrations import gguf_conversion
from kvferry.integrations.checkpoints import (
    PACKAGED_MODELS,
    PackagedModel,
    find_checkpoint,
    find_configuration,
    packaged_parts,
)
from kvferry.integrations.transformers.loading import load_model
from kvferry_plugins.errors import ConfigError


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvferry" / "models"


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory) -> Path:
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, shape in SHAPES.items():
        writer.add_tensor(name, np.random.default_rng(len(name)).normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TOKENS = ["<end>", "a", "b", "ab"]
SHAPES = {
    "token_embd.weight": (4, 8),
    "output_norm.weight": (8,),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_gate.weight": (16, 8),
    "blk.0.ffn_up.weight": (16, 8),
    "blk.0.ffn_down.weight": (8, 16),
}


def test_a_gguf_file_is_converted_once_with_progress(tiny_gguf, own_cache):
    stages: list[tuple[str, float | None]] = []
    folder = find_checkpoint(tiny_gguf, lambda stage, fraction: stages.append((stage, fraction)))
    assert folder.parent == own_cache
    assert ("converting the weights", 0.0) in stages
    assert [stage for stage, _ in stages][-1] == "writing safetensors"
    stages.clear()
    assert find_checkpoint(tiny_gguf, lambda stage, fraction: stages.append((stage, fraction))) == folder
    assert stages == []
    assert sorted(path.suffix for path in own_cache.iterdir()) == ["", ".lock"]


def test_a_converted_file_loads_and_names_its_architecture(tiny_gguf, own_cache):
    loaded = load_model(tiny_gguf)
    assert loaded.identity["architecture"] == "LlamaForCausalLM"
    assert (loaded.geometry.num_layers, loaded.geometry.kv_heads, loaded.geometry.head_dim) == (1, 1, 4)
    expected = np.random.default_rng(len("blk.0.ffn_up.weight")).normal(size=(16, 8)).astype(np.float32)
    assert np.array_equal(loaded.model.model.layers[0].mlp.up_proj.weight.detach().numpy(), expected)
    assert load_model(loaded.path, "bfloat16").geometry.dtype == "bfloat16"


def test_two_processes_do_not_convert_at_once(tiny_gguf, own_cache, monkeypatch):
    original, converting, conversions = gguf_conversion._convert, threading.Event(), []

    def slow(*args: object) -> None:
        conversions.append(args)
        converting.set()
        assert waiting.wait(30)
        original(*args)  # type: ignore[arg-type]

    waiting = threading.Event()
    monkeypatch.setattr(gguf_conversion, "_convert", slow)
    folders: list[Path] = []
    first = threading.Thread(target=lambda: folders.append(find_checkpoint(tiny_gguf)))
    first.start()
    assert converting.wait(30)
    folders.append(find_checkpoint(tiny_gguf, lambda stage, _: waiting.set() if "another process" in stage else None))
    first.join()
    assert len(set(folders)) == len(conversions) == 1


def test_a_conversion_that_fails_leaves_nothing_that_counts(own_cache, tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"broken\.gguf is no GGUF model that transformers can read"):
            find_checkpoint(tmp_path / "broken.gguf")
    assert [path.suffix for path in own_cache.iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_says_what_to_set(tiny_gguf, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        find_checkpoint(tiny_gguf)


def test_a_file_in_parts_is_put_together(tiny_gguf, own_cache, tmp_path):
    data = tiny_gguf.read_bytes()
    parts = []
    for number, piece in enumerate((data[:100], data[100:5000], data[5000:])):
        parts.append(tmp_path / f"tiny.part{number}")
        parts[-1].write_bytes(piece)
    folder = gguf_conversion.convert_once(parts, "tiny.gguf", own_cache, lambda stage, fraction: None)
    whole = find_checkpoint(tiny_gguf)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not list(own_cache.glob("*.gguf"))


def test_packaged_models_are_found_without_importing_them(tmp_path, monkeypatch):
    package = tmp_path / "some_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model.gguf").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    packaged = PackagedModel(("some_model_package",), "*.gguf", "model.gguf", "pip install it")
    assert packaged_parts(packaged) == (package / "model.gguf",)


def test_a_package_that_is_not_installed_comes_with_its_command():
    missing = PackagedModel(("not_there_at_all",), "*.gguf", "model.gguf", "pip install it")
    with pytest.raises(ConfigError, match=r"'not_there_at_all' with model\.gguf is not installed here; pip install it"):
        packaged_parts(missing)


def test_the_default_model_is_packaged():
    assert "smollm2" in PACKAGED_MODELS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "neither a folder, nor a .gguf file, nor one of gemma3, gemma3-270m, smollm2"),
        ("empty", "has no config.json"),
        ("weightless", r"has no \*\.safetensors"),
        ("file.txt", "is no checkpoint; name its folder"),
    ],
)
def test_what_is_no_checkpoint_is_an_input_error(tmp_path, monkeypatch, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    (tmp_path / "file.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        find_checkpoint(name)


def test_a_model_that_is_nowhere_has_no_configuration_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"no model 'nowhere': it is neither a folder, .* nor one of gemma3, gemma3-270m, smollm2"
    ):
        find_configuration("nowhere")


def test_a_checkpoint_that_lacks_weights_is_an_input_error(tiny_gguf, own_cache, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = find_checkpoint(tiny_gguf)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights: \['model.norm.weight'\]"):
        load_model(folder)


def test_a_checkpoint_that_transformers_cannot_load_is_an_input_error(tiny_gguf, own_cache):
    folder = find_checkpoint(tiny_gguf)
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ConfigError, match="transformers cannot load the checkpoint"):
        load_model(folder)


def test_the_configuration_of_a_converted_file_is_where_its_checkpoint_is(tiny_gguf, own_cache):
    with pytest.raises(ConfigError, match=f"is not converted yet.* kvferry demo --model {tiny_gguf}"):
        find_configuration(tiny_gguf)
    assert not own_cache.exists()
    folder = find_checkpoint(tiny_gguf)
    assert find_configuration(tiny_gguf) == folder


def test_the_configuration_of_anything_else_is_where_it_says(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_configuration(tmp_path) == tmp_path
    assert find_configuration(tmp_path / "config.json") == tmp_path / "config.json"
