import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvferry.integrations import model_identity as module
from kvferry.integrations.model_identity import config_digest, model_identity
from kvferry_plugins.errors import ConfigError

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "torch_dtype": "bfloat16", "_name_or_path": "/a"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tensors(change: float = 0.0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "a.weight": random.normal(size=(200, 300)).astype(np.float32) + np.float32(change),
        "b.bias": np.arange(5, dtype=np.float32),
    }


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), folder / "model.safetensors")
    return folder


def test_an_identity_names_the_architecture_and_two_digests(checkpoint):
    identity = model_identity(checkpoint)
    assert identity["architecture"] == "LlamaForCausalLM"
    assert len(identity["config"]) == len(identity["weights"]) == 64


def test_a_copied_folder_is_the_same_model(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "elsewhere")
    os.utime(copy / "model.safetensors", (1, 1))
    assert model_identity(copy) == model_identity(checkpoint)


def test_weights_in_other_files_are_the_same_model(checkpoint, tmp_path):
    sharded = shutil.copytree(checkpoint, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(tensors().items()):
        save_file({name: tensor}, sharded / f"model-{number}.safetensors")
    assert model_identity(sharded) == model_identity(checkpoint)


def test_a_fine_tune_is_another_model(checkpoint, tmp_path):
    tuned = shutil.copytree(checkpoint, tmp_path / "tuned")
    save_file(tensors(change=1e-3), tuned / "model.safetensors")
    ours, theirs = model_identity(checkpoint), model_identity(tuned)
    assert ours["config"] == theirs["config"]
    assert ours["weights"] != theirs["weights"]


def test_one_changed_small_tensor_is_another_model(checkpoint, tmp_path):
    tuned = shutil.copytree(checkpoint, tmp_path / "tuned")
    save_file(tensors() | {"b.bias": np.array([0, 1, 2, 3, 5], dtype=np.float32)}, tuned / "model.safetensors")
    assert model_identity(checkpoint)["weights"] != model_identity(tuned)["weights"]


def test_paths_versions_and_load_dtype_do_not_count_but_shapes_do():
    moved = CONFIG | {
        "torch_dtype": "float32",
        "_name_or_path": "/b",
        "transformers_version": "9",
        "text": [{"dtype": 1}],
    }
    assert config_digest(CONFIG | {"text": [{}]}) == config_digest(moved)
    assert config_digest(CONFIG) != config_digest(CONFIG | {"hidden_size": 65})


def test_the_digest_is_kept_until_the_files_change(checkpoint, monkeypatch):
    before = model_identity(checkpoint)
    calls: list[Path] = []
    original = module.weights_digest
    monkeypatch.setattr(module, "weights_digest", lambda folder: calls.append(folder) or original(folder))
    assert model_identity(checkpoint) == before
    assert calls == []
    save_file(tensors(change=1.0), checkpoint / "model.safetensors")
    os.utime(checkpoint / "model.safetensors", (1, 1))
    assert model_identity(checkpoint) != before
    assert calls == [checkpoint]


def test_a_cache_that_cannot_be_written_costs_only_time(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert model_identity(checkpoint) == model_identity(checkpoint)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]", b"\x0d" + bytes(7) + b'{"a": {"b":1}}']
)
def test_damaged_weights_are_an_input_error(checkpoint, content):
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="no safetensors file, or damaged"):
        model_identity(checkpoint)


@pytest.mark.parametrize("seed", range(3))
def test_a_file_of_noise_is_named_and_not_quoted(checkpoint, seed):
    (checkpoint / "model.safetensors").write_bytes(np.random.default_rng(seed).bytes(100_000))
    assert "but the whole file has 100000" in short_error(checkpoint)


def test_a_header_that_is_not_text_is_named_and_not_quoted(checkpoint):
    noise = np.random.default_rng(0).bytes(100_000)
    (checkpoint / "model.safetensors").write_bytes((90_000).to_bytes(8, "little") + noise)
    assert "its header is not UTF-8" in short_error(checkpoint)


def test_a_tensor_with_a_huge_shape_is_named_and_not_quoted(checkpoint):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": list(range(100_000))}}).encode()
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "ValueError: too many values" in short_error(checkpoint)


@pytest.mark.parametrize(("keep", "says"), [(5, "header"), (60, "header"), (10_000, "its tensors should end at byte")])
def test_a_truncated_file_is_an_input_error(checkpoint, keep, says):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert says in short_error(checkpoint)


def short_error(checkpoint: Path) -> str:
    with pytest.raises(ConfigError, match="no safetensors file, or damaged") as caught:
        model_identity(checkpoint)
    message = str(caught.value)
    assert str(checkpoint / "model.safetensors") in message
    assert len(message.replace(str(checkpoint), "")) < 500
    return message


def test_a_folder_without_weights_is_an_input_error(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        model_identity(checkpoint)
