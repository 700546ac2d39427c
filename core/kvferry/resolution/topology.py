"""Whether a model's heads and layers can be shared out over the ranks that the user asked for."""

from kvferry.checkpoint import ModelSpec
from kvferry.config import EngineArgs
from kvferry.resolution.shape import known_geometry
from kvferry.topology import local_geometry
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import Topology


def broken_topology(args: EngineArgs, model: ModelSpec | None) -> list[ConfigError]:
    """Return why the ranks cannot share the model; a checkpoint whose shape cannot be read is the build's business."""
    topology = Topology(args.tensor_parallel_size, args.pipeline_parallel_size)
    geometry = known_geometry(model) if topology.ranks > 1 else None
    try:
        if geometry is not None:
            local_geometry(geometry, topology, 0)
    except ConfigError as error:
        return [error]
    return []
