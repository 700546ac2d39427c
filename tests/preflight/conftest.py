import json
import struct
from types import SimpleNamespace

import pytest

from kvferry.checkpoint import ModelSpec
from kvferry.config import parse_engine_args
from kvferry.preflight.files import side_from_file
from kvferry.preflight.identity import GivenModel
from kvferry.registry.freezing import freeze
from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.types import Role, RuntimeSupport, TransferBackend

PRETRAINED = {
    "architectures": ["FakeForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
    "dtype": "float32",
}
WINDOWED = {**PRETRAINED, "sliding_window": 64, "sliding_window_pattern": 2}
ON = {"backend": "SCRIPTED", "transceiver_runtime": "PYTHON"}


class ScriptedBackends:
    """Two transports under PYTHON that need no library."""

    name = "scripted"

    def __init__(self) -> None:
        self.hub = ScriptedHub()

    @hookimpl
    def transfer_backends(self):
        return tuple(
            TransferBackend(name, {"PYTHON": RuntimeSupport()}, "kvferry_plugins.testing:none")
            for name in ("SCRIPTED", "OTHER")
        )

    @hookimpl
    def create_transfer_agent(self, spec):
        return ScriptedAgent(spec.name, hub=self.hub)


def write_weights(folder, content: bytes) -> None:
    """A safetensors file of one tensor."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders of two models that differ in their weights alone."""
    folders = {}
    for name in ("one", "two"):
        folders[name] = tmp_path_factory.mktemp(name)
        (folders[name] / "config.json").write_text(json.dumps(PRETRAINED))
        write_weights(folders[name], name.encode() * 8)
    return folders


@pytest.fixture
def kit(checkpoints, monkeypatch, tmp_path):
    """Sides from plain values, as files would give them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    backends = ScriptedBackends()

    def model(pretrained=PRETRAINED, weights="one"):
        return GivenModel(checkpoints[weights], ModelSpec(pretrained["architectures"][0], freeze(pretrained)))

    def side(role, written=None, *, given=True, pretrained=PRETRAINED, weights="one", environ=None, plugins=()):
        args = parse_engine_args({"cache_transceiver_config": dict(ON), **(written or {})}, origin=f"{role}.yaml")
        registry = isolated_registry(backends, *plugins)
        return side_from_file(
            Role(role),
            f"{role}.yaml",
            args,
            registry=registry,
            environ=environ or {},
            model=model(pretrained, weights) if given else None,
        )

    def pair(context=None, generation=None, **options):
        return side("context", context, **options), side("generation", generation, **options)

    return SimpleNamespace(side=side, pair=pair, model=model, backends=backends)
