"""The abstract KV-cache manager: it owns one rank's paged KV memory."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvferry_plugins.layout import BlockIds, KvLayout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """What one tier below the device holds of one group."""

    tier: str
    """``host`` or ``disk``."""
    blocks: int
    nbytes: int
    stored: int = 0
    """Blocks that came here since the start."""
    loaded: int = 0
    """Blocks that went back to the device since the start."""
    dropped: int = 0
    """Blocks that were forgotten here: no room, or damaged."""


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
    """Blocks that the device forgot, or gave to a tier below."""
    block_bytes: int = 0
    """KV bytes of one block, so that bytes are blocks × this."""
    tiers: tuple[TierStatistics, ...] = ()


class KVCacheManager(ABC):
    """Paged KV memory with reference counts and prefix reuse.

    Every method may be called from any thread: the engine allocates while the transfer loop releases.
    A call that raises has changed nothing.
    """

    kind: ClassVar[str]
    """The name that its ``ManagerKind`` declares: ``V1``, ``V2``, or a plugin's own."""

    wraps: "KVCacheManager | Sequence[KVCacheManager] | None" = None
    """What this manager hands its calls on to; None = whatever managers its attributes hold. See ``forwarding``."""

    @property
    @abstractmethod
    def layout(self) -> KvLayout:
        """Where the blocks are, with addresses."""

    @abstractmethod
    def allocate(
        self,
        request_id: int,
        num_tokens: int,
        token_ids: Sequence[int] = (),
        *,
        max_cached_tokens: int | None = None,
        history_tokens: int = 0,
    ) -> int:
        """Give a new request the blocks for ``num_tokens`` tokens.

        A manager with windows may leave out (−1 in the table) what no token to come reads, and may give blocks of a
        sliding window only as ``extend`` asks for them.

        Args:
            request_id: unknown to the manager so far.
            num_tokens: capacity in tokens, ≥ 1.
            token_ids: the prompt; full blocks that an earlier request committed are shared instead of allocated.
            max_cached_tokens: reuse at most so many tokens (a context worker passes ``len(prompt) - 1``, because it
                needs the last token's logits). None = as many as there are.
            history_tokens: leading tokens that are not computed here but received (a generation worker passes
                ``len(prompt)``): of a sliding window only what the token behind them reads needs blocks.

        Returns:
            Tokens whose KV is already there: a multiple of every group's ``tokens_per_block``.

        Raises:
            CacheFullError: with the figures.
            ValueError: the request is already here, or ``num_tokens`` < 1.
        """

    @abstractmethod
    def extend(self, request_id: int, num_tokens: int) -> None:
        """Make room for all tokens up to ``num_tokens`` that are not computed yet; an engine asks before each step.

        Raises:
            CacheFullError: with the figures; the request keeps what it had.
            KeyError: no such request.
        """

    def advance(self, request_id: int, computed_tokens: int) -> None:  # noqa: B027 -- a manager without windows has nothing to do
        """Hear that the KV of the first tokens is complete: blocks that slid out of a window may go back (−1 from now).

        Raises:
            KeyError: no such request.
        """

    def suspend(self, request_id: int) -> None:
        """Move a request's blocks off the device, contents and all; ``block_table`` is not to be used until ``resume``.

        Raises:
            CacheFullError: the tiers below have no room; the request stays as it was.
            KeyError: no such request.
            ValueError: suspended already, or a hold (a transfer) has a block of it that is not committed.
            NotImplementedError: this manager has no tiers.
        """
        raise NotImplementedError(f"KV-cache manager {self.kind} has no tiers; set use_kv_cache_manager_v2: true")

    def resume(self, request_id: int) -> None:
        """Bring a suspended request's blocks back, with the contents that they had.

        Raises:
            CacheFullError: no room on the device; the request stays suspended.
            KeyError: no such request.
            ValueError: it is not suspended.
            CorruptBlockError: a block file is damaged; the request is lost, its blocks are given back.
            NotImplementedError: this manager has no tiers.
        """
        raise NotImplementedError(f"KV-cache manager {self.kind} has no tiers; set use_kv_cache_manager_v2: true")

    @abstractmethod
    def block_table(self, request_id: int) -> tuple[BlockIds, ...]:
        """One int32[n] array of block ids a group, in token order, −1 = not here; a copy. Raises KeyError."""

    @abstractmethod
    def commit(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Offer the full blocks of ``token_ids`` for reuse; their KV must be complete. Committing again is harmless.

        Returns:
            Tokens that are now committed for this request: a multiple of every group's ``tokens_per_block``.
        """

    def leave_out(self, request_id: int, leading_tokens: Sequence[int]) -> None:  # noqa: B027 -- a manager without windows is never told
        """Hear that of what is received so many leading tokens are missing, a group each: a window does not need them.

        A block that lacks some of its tokens is not to be offered for reuse. Told again, the larger number counts.

        Raises:
            KeyError: no such request.
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
    def role_views(self, layer: int) -> "Mapping[str, torch.Tensor]":
        """A global layer's memory by role (``key``, ``value``, ``latent``, …), views of the pool.

        Each ``[num_blocks, heads, tokens_per_block, width]``, of a state ``[num_blocks, heads, 1, width]``.
        """

    def layer_views(self, layer: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Key and value of an attention layer, each ``[num_blocks, kv_heads, tokens_per_block, head_dim]``."""
        views = self.role_views(layer)
        return views["key"], views["value"]

    @abstractmethod
    def statistics(self, group: int = 0) -> CacheStatistics:
        """Count the blocks of one group."""

    def bytes_in_use(self) -> int:
        """KV bytes of the blocks that requests and holds have, over all groups."""
        figures = [self.statistics(group) for group in range(len(self.layout.groups))]
        return sum(each.in_use * each.block_bytes for each in figures)

    @abstractmethod
    def shutdown(self) -> None:
        """Give the memory back; idempotent."""
