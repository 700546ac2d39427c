"""Which model a side is to serve, as far as its files tell; nothing is converted or loaded."""

from dataclasses import dataclass
from pathlib import Path

from kvferry.checkpoint import ModelSpec, load_model_spec
from kvferry.integrations.checkpoints import find_configuration, weight_files
from kvferry.integrations.model_identity import config_digest, model_identity
from kvferry.preflight.sides import Fact, unknown
from kvferry_plugins.errors import ConfigError

NO_MODEL = "no model is given for this side: add --model, or give the running worker's address"
_FIELDS = ("model.architecture", "model.config", "model.weights")


@dataclass(frozen=True, slots=True)
class GivenModel:
    """A checkpoint that the operator named."""

    folder: Path
    """Or its ``config.json``."""
    spec: ModelSpec


def find_model(model: Path) -> GivenModel:
    """Find a checkpoint's configuration. Raises ConfigError."""
    place = find_configuration(model)
    return GivenModel(place, load_model_spec(place))


def model_facts(model: GivenModel | None) -> dict[str, Fact]:
    """What the handshake would compare of the model. Raises ConfigError: its weights are damaged."""
    if model is None:
        return dict.fromkeys(_FIELDS, unknown(NO_MODEL))
    return {
        "model.architecture": Fact(model.spec.architecture or ""),
        "model.config": Fact(config_digest(model.spec.pretrained_config or {})),
        "model.weights": _weights(model.folder),
    }


def _weights(folder: Path) -> Fact:
    if not folder.is_dir():
        return unknown(f"{folder} is no folder with weights: give --model the folder")
    try:
        weight_files(folder)
    except ConfigError:
        return unknown(f"{folder} has no *.safetensors to compare: give --model the folder that the worker serves")
    return Fact(model_identity(folder)["weights"])
