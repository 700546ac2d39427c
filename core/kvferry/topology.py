"""How a model's KV cache is shared out over the ranks of one instance."""

from dataclasses import replace

from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape, ModelGeometry, Topology


def local_geometry(geometry: ModelGeometry, topology: Topology, rank: int) -> ModelGeometry:
    """Cut a whole model's geometry down to one rank's layers and heads.

    Pipeline stages take consecutive layers; where they do not divide, the first stages get one more, as torch's
    ``tensor_split`` has it. Heads are split over the tensor ranks; where there are fewer heads than ranks, consecutive
    ranks hold the same ones (MLA's latent row: all of them).

    Args:
        geometry: of the whole model.
        topology: of the instance.
        rank: within the data-parallel group, numbered stage by stage.

    Raises:
        ConfigError: heads or layers cannot be shared out so, or a window is no positive number; names the setting.
        ValueError: there is no such rank.
    """
    if not 0 <= rank < topology.ranks:
        raise ValueError(f"rank {rank} is none of the {topology.ranks} ranks of {topology}")
    _require_windows(geometry)
    if topology.ranks == 1:
        return geometry
    stage, tensor_rank = divmod(rank, topology.tensor)
    first, count = _layers_of(geometry.num_layers, topology.pipeline, stage)
    chosen = slice(first, first + count)
    part = _Part(topology.tensor, tensor_rank)
    heads, start = part.of(geometry.kv_heads, geometry.kv_heads, "the KV cache")
    layers = (part.of_layer(shape, first + index) for index, shape in enumerate(geometry.layers[chosen]))
    return replace(
        geometry,
        num_layers=count,
        kv_heads=heads,
        windows=geometry.windows[chosen],
        layers=tuple(layers),
        first_layer=geometry.first_layer + first,
        head_start=start,
        total_heads=geometry.kv_heads,
    )


def _require_windows(geometry: ModelGeometry) -> None:
    windows = (*geometry.windows, *(shape.window for shape in geometry.layers))
    wrong = next((window for window in windows if window is not None and window < 1), None)
    if wrong is not None:
        raise ConfigError(
            f"a sliding window of {wrong} tokens holds not even the token that asks; 'max_attention_window' and the "
            "checkpoint's 'sliding_window' take integers > 0, or null for full attention",
            setting="kv_cache_config.max_attention_window",
        )


def _layers_of(layers: int, stages: int, stage: int) -> tuple[int, int]:
    """First layer of a stage, and how many it has."""
    if stages > layers:
        raise ConfigError(
            f"'pipeline_parallel_size' is {stages}, but the model has {layers} layers; set it to {layers} or less",
            setting="pipeline_parallel_size",
        )
    each, extra = divmod(layers, stages)
    return stage * each + min(stage, extra), each + (stage < extra)


class _Part:
    """One tensor rank's part of whatever has heads."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def of_layer(self, shape: LayerShape, layer: int) -> LayerShape:
        """Cut all roles in the same proportion; the first one's heads count."""
        leading = shape.roles[0].heads
        parts = [self.of(role.heads, leading, f"layer {layer}'s {role.name}") for role in shape.roles]
        roles = tuple(replace(role, heads=heads) for role, (heads, _) in zip(shape.roles, parts, strict=True))
        return replace(shape, roles=roles, head_start=parts[0][1], total_heads=leading)

    def of(self, heads: int, leading: int, what: str) -> tuple[int, int]:
        """This rank's heads, and the first of them; ``leading`` heads say in how many parts they are cut."""
        if leading % self._ranks == 0:
            parts = self._ranks
        elif self._ranks % leading == 0:
            parts = leading
        else:
            raise ConfigError(
                f"'tensor_parallel_size' is {self._ranks}, but {what} has {leading} heads, and neither divides the "
                "other; choose a size that divides the heads, or a multiple of them",
                setting="tensor_parallel_size",
            )
        if heads % parts:
            raise ConfigError(
                f"'tensor_parallel_size' is {self._ranks}, but {what} has {heads} heads, which cannot be shared out "
                f"over {parts} parts",
                setting="tensor_parallel_size",
            )
        each = heads // parts
        return each, self._rank * parts // self._ranks * each
