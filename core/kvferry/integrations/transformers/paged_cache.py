"""A transformers cache whose keys and values lie in a KV-cache manager's blocks.

Import this module only where transformers is wanted: a subclass needs its base.
"""

from typing import Any

import torch  # noqa: TID253
from transformers.cache_utils import Cache, CacheLayerMixin  # noqa: TID253

from kvferry_plugins.kv_cache import KVCacheManager


class BlockSlots:
    """Where the tokens of one request are: its block table, kept as a tensor, and grown when a token needs room.

    Serves managers with one layer group.
    """

    def __init__(self, manager: KVCacheManager, request_id: int) -> None:
        self._manager = manager
        self._request_id = request_id
        group = manager.layout.groups[0]
        self.tokens_per_block = group.tokens_per_block
        self._device = manager.layout.pools[group.pools[0]].device
        self._reload()
        self._span = (-1, -1)

    def locate(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | slice]:
        """Make room for tokens up to ``stop``.

        Returns:
            Block and position inside it of the tokens ``start`` … ``stop``, int64 each, and the blocks of all tokens
            before ``stop``: int64, or a slice where they are consecutive.

        Raises:
            CacheFullError: no block is left; nothing was written.
        """
        if (start, stop) != self._span:  # every layer of one step asks the same
            if stop > len(self._table) * self.tokens_per_block:
                self._manager.extend(self._request_id, stop)
                self._reload()
            tokens = torch.arange(start, stop, device=self._device)
            self._blocks = self._table[tokens // self.tokens_per_block]
            self._positions = tokens % self.tokens_per_block
            self._used = _consecutive(self._table[: -(-stop // self.tokens_per_block)])
            self._span = (start, stop)
        return self._blocks, self._positions, self._used

    def _reload(self) -> None:
        (table,) = self._manager.block_table(self._request_id)
        self._table = torch.from_numpy(table).to(device=self._device, dtype=torch.int64)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, written straight into the blocks and gathered for the attention of one step.

    A layer with a sliding window keeps all tokens too; transformers' mask hides what is behind the window.
    """

    def __init__(self, views: tuple[torch.Tensor, torch.Tensor], slots: BlockSlots, length: int) -> None:
        super().__init__()
        self._key_view, self._value_view = views
        self._slots = slots
        self.length = length
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to initialise: the blocks exist."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's keys and values and return all so far, each ``[1, kv_heads, tokens, head_dim]``.

        Raises:
            CacheFullError: no block is left; nothing was written.
        """
        stop = self.length + key_states.shape[-2]
        blocks, positions, used = self._slots.locate(self.length, stop)
        self._key_view[blocks, :, positions] = key_states[0].transpose(0, 1)
        self._value_view[blocks, :, positions] = value_states[0].transpose(0, 1)
        self.length = stop
        return _gather(self._key_view, used, stop), _gather(self._value_view, used, stop)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of what ``update`` will return, and the position of its first token."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens whose keys and values are here."""
        return self.length

    def get_max_length(self) -> int:
        """−1: the blocks may grow."""
        return -1


class PagedCache(Cache):  # type: ignore[misc]
    """The cache of one request, batch size 1, over the blocks that the manager gave it.

    Args:
        manager: has the request's blocks; one layer group.
        request_id: the request.
        cached_tokens: leading tokens whose KV is in the blocks already.
    """

    def __init__(self, manager: KVCacheManager, request_id: int, *, cached_tokens: int = 0) -> None:
        slots = BlockSlots(manager, request_id)
        layers = [
            PagedLayer(manager.layer_views(layer), slots, cached_tokens) for layer in manager.layout.groups[0].layers
        ]
        super().__init__(layers=layers)

    @property
    def computed_tokens(self) -> int:
        """Leading tokens whose KV is complete in every layer."""
        lengths: list[int] = [layer.length for layer in self.layers]
        return min(lengths)


def _consecutive(blocks: torch.Tensor) -> torch.Tensor | slice:
    """The same blocks as a slice where they are consecutive: that copies without an index."""
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first == len(blocks) - 1 and bool((blocks.diff() == 1).all()):
        return slice(first, last + 1)
    return blocks


def _gather(view: torch.Tensor, blocks: torch.Tensor | slice, length: int) -> torch.Tensor:
    """Copy blocks ``[n, heads, tokens, dim]`` into one run of tokens, ``[1, heads, length, dim]``."""
    _, heads, _, head_dim = view.shape
    # Not index_select: it would first copy the whole pool's layer, whose strides it does not take.
    return view.transpose(0, 1)[:, blocks].reshape(1, heads, -1, head_dim)[:, :, :length]
