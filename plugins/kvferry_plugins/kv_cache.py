"""The abstract KV-cache manager: it owns one rank's paged KV memory."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvferry_plugins.layout import BlockIds, KvLayout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Blocks of one group, each counted once: total = free + cached + in_use."""

    total: int
    free: int
    cached: int
    """Nobody holds them, but their contents can be reused; evicted when needed."""
    in_use: int
    """A request or a hold (a transfer, a quarantine) has them."""
    reused_tokens: int = 0
    """Tokens that prefix reuse has saved since the start."""
    evicted: int = 0


class KVCacheManager(ABC):
    """Paged KV memory with reference counts and prefix reuse.

    Every method may be called from any thread: the engine allocates while the transfer loop releases.
    A call that raises has changed nothing.
    """

    kind: ClassVar[str]
    """The name that its ``ManagerKind`` declares: ``V1``, ``V2``, or a plugin's own."""

    @property
    @abstractmethod
    def layout(self) -> KvLayout:
        """Where the blocks are, with addresses."""

    @abstractmethod
    def allocate(
        self, request_id: int, num_tokens: int, token_ids: Sequence[int] = (), *, max_cached_tokens: int | None = None
    ) -> int:
        """Give a new request the blocks for ``num_tokens`` tokens.

        Args:
            request_id: unknown to the manager so far.
            num_tokens: capacity in tokens, ≥ 1.
            token_ids: the prompt; full blocks that an earlier request committed are shared instead of allocated.
            max_cached_tokens: reuse at most so many tokens (a context worker passes ``len(prompt) - 1``, because it
                needs the last token's logits). None = as many as there are.

        Returns:
            Tokens whose KV is already there: a multiple of ``tokens_per_block``.

        Raises:
            CacheFullError: with the figures.
            ValueError: the request is already here, or ``num_tokens`` < 1.
        """

    @abstractmethod
    def extend(self, request_id: int, num_tokens: int) -> None:
        """Grow a request's capacity to at least ``num_tokens`` tokens.

        Raises:
            CacheFullError: with the figures; the request keeps what it had.
            KeyError: no such request.
        """

    @abstractmethod
    def block_table(self, request_id: int) -> tuple[BlockIds, ...]:
        """One int32[n] array of block ids a group, in token order; a copy. Raises KeyError."""

    @abstractmethod
    def commit(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Offer the full blocks of ``token_ids`` for reuse; their KV must be complete. Committing again is harmless.

        Returns:
            Tokens that are now committed for this request: a multiple of ``tokens_per_block``.
        """

    @abstractmethod
    def free(self, request_id: int) -> None:
        """Give the request's blocks back (held ones when their last hold ends). Unknown ids are a KeyError."""

    @abstractmethod
    def hold(self, tables: Sequence[BlockIds]) -> None:
        """Add a reference to each block (−1 is skipped), one array a group: nobody gets it before ``release``.

        Raises:
            ValueError: a block is not in use; nothing was held.
        """

    @abstractmethod
    def release(self, tables: Sequence[BlockIds]) -> None:
        """Undo one ``hold`` of the same blocks."""

    @abstractmethod
    def layer_views(self, layer: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Key and value of a layer, each ``[num_blocks, kv_heads, tokens_per_block, head_dim]``, views of the pool."""

    @abstractmethod
    def statistics(self, group: int = 0) -> CacheStatistics:
        """Count the blocks of one group."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give the memory back; idempotent."""
