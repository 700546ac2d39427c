"""A transformers cache whose keys and values lie in a KV-cache manager's blocks.

Import this module only where transformers is wanted: a subclass needs its base.
"""

from collections.abc import Iterator
from typing import Any

import torch  # noqa: TID253
from transformers.cache_utils import Cache, CacheLayerMixin  # noqa: TID253

from kvferry.integrations.transformers.block_slots import BlockSlots, RequestBlocks
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.types import ModelGeometry


class TokenLayer(CacheLayerMixin):  # type: ignore[misc]
    """What attention layers share: so many tokens are here, of which a step sees those in the window.

    What ``update`` returns is, to the token, what transformers' own dynamic cache would: the window's tokens before
    the step, and the step's.
    """

    def __init__(self, slots: BlockSlots, length: int) -> None:
        super().__init__()
        self._slots = slots
        self.length = length
        self.is_initialized = True
        self.is_sliding = slots.window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to initialise: the blocks exist."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of what ``update`` will return, and the position of its first token."""
        first = self._slots.first_visible(self.length)
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        """Tokens that were computed."""
        return self.length

    def get_max_length(self) -> int:
        """−1: the blocks may grow."""
        return -1

    def _step(self, tokens: int) -> BlockSlots:
        """The slots of a step of so many tokens. Raises CacheFullError."""
        self._slots.locate(self.length, self.length + tokens)
        self.length += tokens
        return self._slots


class PagedLayer(TokenLayer):
    """One layer's keys and values, written straight into the blocks and gathered for the attention of one step."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, slots: BlockSlots, length: int) -> None:
        super().__init__(slots, length)
        self._key_view, self._value_view = key, value

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's keys and values and return those that it sees, each ``[1, kv_heads, tokens, head_dim]``.

        Raises:
            CacheFullError: no block is left; nothing was written.
        """
        slots = self._step(key_states.shape[-2])
        slots.write(self._key_view, key_states)
        slots.write(self._value_view, value_states)
        return slots.gather(self._key_view), slots.gather(self._value_view)


class PagedCache(Cache):  # type: ignore[misc]
    """The cache of one request, batch size 1, over the blocks that the manager gave it.

    Args:
        manager: has the request's blocks.
        request_id: the request.
        geometry: the model's own: its windows are what attention sees, whatever the manager keeps.
        cached_tokens: leading tokens whose KV is in the blocks already.
    """

    def __init__(
        self, manager: KVCacheManager, request_id: int, geometry: ModelGeometry, *, cached_tokens: int = 0
    ) -> None:
        self._blocks = RequestBlocks(manager, request_id)
        super().__init__(layers=list(_layers(manager, self._blocks, geometry, cached_tokens)))

    @property
    def computed_tokens(self) -> int:
        """Leading tokens whose KV is complete in every layer."""
        lengths: list[int] = [layer.length for layer in self.layers]
        return min(lengths)

    def prepare(self, stop: int) -> None:
        """Make room for the tokens before ``stop``, before a step writes any. Raises CacheFullError."""
        self._blocks.prepare(stop)


def _layers(
    manager: KVCacheManager, blocks: RequestBlocks, geometry: ModelGeometry, length: int
) -> Iterator[CacheLayerMixin]:
    layout = manager.layout
    shared: dict[tuple[int, int | None], BlockSlots] = {}
    for position in range(geometry.num_layers):
        layer, window = geometry.first_layer + position, geometry.shape(position).window
        index = layout.group_of(layer)
        group = layout.groups[index]
        if (index, window) not in shared:
            device = layout.pools[group.pools[0]].device
            shared[index, window] = BlockSlots(blocks, index, group, device, window)
        yield PagedLayer(*manager.layer_views(layer), shared[index, window], length)
