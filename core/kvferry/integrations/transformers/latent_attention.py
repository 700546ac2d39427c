"""MLA: a layer's cache is one latent row a token, from which the attention expands keys and values anew at each step.

transformers hands its caches exactly that since 5.24: the compressed row, and the rotated part that all heads share.
"""

from typing import Any

import torch  # noqa: TID253

from kvferry.integrations.transformers.block_slots import BlockSlots
from kvferry.integrations.transformers.token_layers import TokenLayer
from kvferry_plugins.errors import ConfigError


class LatentLayer(TokenLayer):
    """One layer's latents, the compressed row first, as one head in the blocks."""

    def __init__(self, latent: torch.Tensor, slots: BlockSlots, length: int) -> None:
        super().__init__(slots, length)
        self._view = latent

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's rows and return those that it sees, split as they came.

        Args:
            key_states: the compressed rows, ``[1, 1, tokens, kv_lora_rank]``.
            value_states: the rotated parts, ``[1, 1, tokens, qk_rope_head_dim]``.
            args: what else transformers tells its caches.
            kwargs: as ``args``.

        Raises:
            ConfigError: they are expanded keys and values: transformers is too old, or does this model otherwise.
            CacheFullError: no block is left; nothing was written.
        """
        widths = (key_states.shape[-1], value_states.shape[-1])
        if key_states.shape[1] != 1 or sum(widths) != self._view.shape[-1]:
            raise ConfigError(
                f"transformers caches {key_states.shape[1]} heads of {widths} elements, not one latent row of "
                f"{self._view.shape[-1]}; latents need transformers 5.24 or later: pip install -U transformers"
            )
        slots = self._step(key_states.shape[-2])
        slots.write(self._view, torch.cat((key_states, value_states), dim=-1))
        rows = slots.gather(self._view)
        return rows[..., : widths[0]], rows[..., widths[0] :]
