"""Attention layers over a manager's blocks: what they have in common, and the one that keeps keys and values."""

from typing import Any

import torch  # noqa: TID253
from transformers.cache_utils import CacheLayerMixin  # noqa: TID253

from kvferry.integrations.transformers.block_slots import BlockSlots


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
