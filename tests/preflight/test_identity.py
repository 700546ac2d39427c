"""Which model a side serves is told by its files alone, or is unknown."""

import json

import pytest
from preflight.conftest import PRETRAINED

from kvferry.integrations.model_identity import model_identity
from kvferry.preflight.identity import find_model, model_facts
from kvferry_plugins.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_checkpoint_is_identified_as_a_worker_does(checkpoints):
    facts = model_facts(find_model(checkpoints["one"]))
    identity = model_identity(checkpoints["one"])
    assert {name: facts[f"model.{name}"].value for name in identity} == identity
    assert all(fact.known and not fact.doubt for fact in facts.values())


@pytest.mark.parametrize("name", ["", "config.json"], ids=["folder", "file"])
def test_of_a_configuration_without_weights_the_weights_are_unknown(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(PRETRAINED))
    facts = model_facts(find_model(tmp_path / name))
    assert facts["model.config"].known
    assert not facts["model.weights"].known
    assert "give --model the folder" in facts["model.weights"].doubt


def test_damaged_weights_are_wrong_input(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PRETRAINED))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="is no safetensors file"):
        model_facts(find_model(tmp_path))
