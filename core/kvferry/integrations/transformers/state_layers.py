"""Layers that keep a state of fixed size: transformers updates it in place, in the manager's state block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch  # noqa: TID253
from transformers.cache_utils import DynamicCache, LinearAttentionLayer  # noqa: TID253

from kvferry.integrations.transformers.block_slots import RequestBlocks
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import LayerShape


@dataclass(frozen=True, slots=True)
class StateShapes:
    """The tensors that one layer's state is, batch size 1."""

    conv: tuple[int, ...]
    """``[1, channels, kernel]``."""
    recurrent: tuple[int, ...] | None
    """``[1, heads, …]``; None where there is none."""

    def by_role(self) -> dict[str, tuple[int, ...]]:
        """The shapes by the role that the manager keeps them under."""
        return {"conv": self.conv} | ({"recurrent": self.recurrent} if self.recurrent else {})


def find_state_shapes(model: Any, cache_argument: str, kept: Mapping[int, LayerShape]) -> dict[int, StateShapes]:
    """Learn how a model's states look by running one token: no configuration says it for all models.

    Args:
        model: in evaluation mode.
        cache_argument: what its ``forward`` calls its cache.
        kept: layer → what ``config.json`` says that it keeps, for every layer with a state.

    Raises:
        ConfigError: a layer has other states than its configuration says.
    """
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        model(input_ids=token, use_cache=True, logits_to_keep=1, **{cache_argument: cache})
    return {layer: _checked(layer, cache.layers[layer], shape) for layer, shape in kept.items()}


def _checked(layer: int, state: Any, shape: LayerShape) -> StateShapes:
    found = {"conv": state.conv_states, "recurrent": state.recurrent_states}
    tensors = {name: states[0] for name, states in found.items() if len(states) == 1 and states[0] is not None}
    have = {name: tensor.numel() for name, tensor in tensors.items()}
    want = {role.name: role.heads * role.width for role in shape.roles}
    if have != want:
        raise ConfigError(
            f"the state of layer {layer} has (role: elements) {have} in transformers, but {want} by the checkpoint's "
            "config.json: kvferry does not know this model; report its architecture"
        )
    recurrent = tensors.get("recurrent")
    return StateShapes(tuple(tensors["conv"].shape), None if recurrent is None else tuple(recurrent.shape))


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """One layer's state, views of the request's block that transformers copies into.

    Args:
        views: the pool's by role, each ``[blocks, 1, 1, width]``.
        shapes: of the tensors.
        blocks: the request's.
        group: index of the layer group.
        started: whether the block holds the state of earlier tokens.
    """

    def __init__(
        self, views: Mapping[str, torch.Tensor], shapes: StateShapes, blocks: RequestBlocks, group: int, started: bool
    ) -> None:
        super().__init__()
        self._views, self._shapes = views, shapes
        self._request, self._group = blocks, group
        conv = views["conv"]
        self.dtype, self.device = conv.dtype, conv.device
        self.conv_kernel_size[0] = shapes.conv[-1]
        self.is_conv_states_initialized[0] = True
        self.is_recurrent_states_initialized[0] = shapes.recurrent is not None
        self.has_previous_state[0] = started
        self.attach()

    def attach(self) -> None:
        """Look up the block again: a request that was suspended comes back to another one."""
        block = int(self._request.tables[self._group][0])
        states = {role: self._views[role][block].view(shape) for role, shape in self._shapes.by_role().items()}
        self.conv_states[0], self.recurrent_states[0] = states["conv"], states.get("recurrent")
