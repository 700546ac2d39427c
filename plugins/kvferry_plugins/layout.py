"""Where a KV block's bytes are: pools, layer groups, and the strides that lead from a block id to addresses.

The same type describes our own dense pools and a host engine's tensors, so that a transceiver never asks who owns the
memory. Nothing here touches memory; addresses are plain integers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# As text: a command that only resolves imports this module too, and has no 0.1 s to spend on NumPy.
BlockIds: TypeAlias = "NDArray[np.int32]"
"""Block ids of one request in one group, in token order, int32[n]; −1 = not here."""

Addresses: TypeAlias = "NDArray[np.int64]"
"""Byte addresses or byte counts, int64[n]."""

LayerKind: TypeAlias = Literal["attention", "latent", "state"]
"""What a layer keeps: keys and values a head and token, one latent row a token (MLA), or a fixed-size state."""


@dataclass(frozen=True, slots=True)
class RoleView:
    """One (layer, role) inside a block of its pool.

    Head h, token t of the block starts at ``offset + h * head_stride + t * token_stride`` and is ``row_bytes`` long.
    """

    layer: int
    """Global layer index."""
    role: str
    """``key``, ``value``, or a model's own (``latent``, …)."""
    offset: int
    """Bytes from the block's start."""
    heads: int
    head_stride: int
    """Bytes between two heads."""
    tokens: int
    token_stride: int
    """Bytes between two tokens of one head."""
    row_bytes: int
    """Bytes of one (head, token): head_dim × item size."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (offset, nbytes) of each contiguous run, in address order per head."""
        for head in range(self.heads):
            start = self.offset + head * self.head_stride
            if self.token_stride == self.row_bytes:
                yield start, self.tokens * self.row_bytes
            else:
                for token in range(self.tokens):
                    yield start + token * self.token_stride, self.row_bytes


@dataclass(frozen=True)
class Pool:
    """One region of memory that is cut into equal blocks."""

    base: int
    """Address of block 0; 0 in a layout that only describes geometry."""
    block_stride: int
    """Bytes from one block to the next."""
    num_blocks: int
    views: tuple[RoleView, ...]
    device: str = "cpu"
    """``cpu`` or ``cuda:N``."""

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The block's bytes as maximal contiguous (offset, nbytes) runs, in address order.

        A dense block is one run.
        """
        merged: list[tuple[int, int]] = []
        for offset, nbytes in sorted(run for view in self.views for run in view.runs()):
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + nbytes)
            else:
                merged.append((offset, nbytes))
        return tuple(merged)

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block, without any padding between its runs."""
        return sum(nbytes for _, nbytes in self.runs)

    @property
    def nbytes(self) -> int:
        """Bytes from the pool's first to behind its last block: what an agent registers."""
        return self.block_stride * self.num_blocks


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a life cycle, and therefore a table of block ids."""

    layers: tuple[int, ...]
    """Global layer indices."""
    pools: tuple[int, ...]
    """Indices into ``KvLayout.pools``; one block id of the group stands for one block in each of them."""
    tokens_per_block: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window in tokens, or None for full attention."""
    kind: LayerKind = "attention"
    head_start: int = 0
    """Global index of this rank's first head: ranks with equal indices hold the same heads (MLA: all hold head 0)."""
    total_heads: int = 0
    """Heads over all ranks; 0 = ``kv_heads``, one rank has all."""

    def blocks_for(self, num_tokens: int) -> int:
        """Block ordinals that a sequence of so many tokens spans; a state is one block whatever its length."""
        if self.kind == "state":
            return min(num_tokens, 1)
        return -(-num_tokens // self.tokens_per_block)

    def first_block_needed(self, num_tokens: int) -> int:
        """Ordinal of the first block that token number ``num_tokens`` (0-based: the next one) and its successors read.

        A query at position q sees the keys from q − window + 1 to q, as in transformers.
        """
        if self.window is None or self.kind == "state":
            return 0
        return max(0, num_tokens + 1 - self.window) // self.tokens_per_block


@dataclass(frozen=True)
class KvLayout:
    """All of one rank's KV memory.

    Attributes:
        dtype: torch's name without the module: ``float32``, ``bfloat16``, …
        groups: layer groups; a request has one block table a group.
        pools: the memory they lie in.
    """

    dtype: str
    groups: tuple[LayerGroup, ...]
    pools: tuple[Pool, ...]

    def block_bytes(self, group: int) -> int:
        """KV bytes that one block id of ``group`` stands for, over all its pools."""
        return sum(self.pools[pool].block_bytes for pool in self.groups[group].pools)

    def group_of(self, layer: int) -> int:
        """Index of the group that a global layer is in. Raises KeyError."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index
        raise KeyError(f"layer {layer} is in no layer group")

    def num_blocks(self, group: int) -> int:
        """Block ids of ``group`` run from 0 to this, exclusive."""
        return min(self.pools[pool].num_blocks for pool in self.groups[group].pools)


def dense_pool(
    *,
    layers: tuple[int, ...],
    kv_heads: int,
    head_dim: int,
    tokens_per_block: int,
    item_bytes: int,
    num_blocks: int,
    base: int = 0,
    device: str = "cpu",
    roles: tuple[str, ...] = ("key", "value"),
) -> Pool:
    """The pool of our own managers: ``[block][layer][role][kv head][token][dim]`` with no gap anywhere."""
    row = head_dim * item_bytes
    head = tokens_per_block * row
    role_bytes = kv_heads * head
    views = tuple(
        RoleView(
            layer=layer,
            role=role,
            offset=(position * len(roles) + which) * role_bytes,
            heads=kv_heads,
            head_stride=head,
            tokens=tokens_per_block,
            token_stride=row,
            row_bytes=row,
        )
        for position, layer in enumerate(layers)
        for which, role in enumerate(roles)
    )
    stride = len(layers) * len(roles) * role_bytes
    return Pool(base=base, block_stride=stride, num_blocks=num_blocks, views=views, device=device)


@dataclass(frozen=True, eq=False)
class PoolCopy:
    """Which bytes of a block of one pool go where in a block of another, the same for every pair of blocks.

    Compared by identity: what a writer prepares from one, it may keep for as long as the peer is there.
    """

    src: Pool
    dst: Pool
    runs: Addresses
    """int64[n, 3] of (offset in the source's block, in the destination's, bytes), ascending by source."""

    @cached_property
    def block_bytes(self) -> int:
        """Bytes that one pair of blocks moves."""
        return int(self.runs[:, 2].sum())

    @cached_property
    def is_dense(self) -> bool:
        """Whether whole blocks move, without a gap to the next one at either end."""
        stride = self.src.block_stride
        return self.dst.block_stride == stride and self.runs.tolist() == [[0, 0, stride]]


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """Pairs of blocks, each of which gets every run of ``pools``."""

    pools: PoolCopy
    src: BlockIds
    dst: BlockIds

    @property
    def nbytes(self) -> int:
        """Bytes of all pairs."""
        return len(self.src) * self.pools.block_bytes
