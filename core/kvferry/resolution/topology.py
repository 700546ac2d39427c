"""Whether a model's heads and layers can be shared out over the ranks that the user asked for."""

import contextlib

from kvferry.checkpoint import ModelSpec, model_geometry
from kvferry.config import EngineArgs
from kvferry.topology import local_geometry
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import ModelGeometry, Topology


def broken_topology(args: EngineArgs, model: ModelSpec | None) -> list[ConfigError]:
    """Return why the ranks cannot share the model; a checkpoint whose shape cannot be read is the build's business."""
    topology = Topology(args.tensor_parallel_size, args.pipeline_parallel_size)
    geometry = _geometry(model) if topology.ranks > 1 else None
    try:
        if geometry is not None:
            local_geometry(geometry, topology, 0)
    except ConfigError as error:
        return [error]
    return []


def _geometry(model: ModelSpec | None) -> ModelGeometry | None:
    if model is None or model.pretrained_config is None:
        return None
    with contextlib.suppress(ConfigError):
        return model_geometry(model.pretrained_config)
    return None
