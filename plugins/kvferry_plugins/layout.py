"""Where a KV block's bytes are: pools, layer groups, and the strides that lead from a block id to addresses.

The same type describes our own dense pools and a host engine's tensors, so that a transceiver never asks who owns the
memory. Nothing here touches memory; addresses are plain integers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# As text: a command that only resolves imports this module too, and has no 0.1 s to spend on NumPy.
BlockIds: TypeAlias = "NDArray[np.int32]"
"""Block ids of one request in one group, in token order, int32[n]; −1 = not here."""

Addresses: TypeAlias = "NDArray[np.int64]"
"""Byte addresses or byte counts, int64[n]."""


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
    pools: tuple[int, ...]
    """Indices into ``KvLayout.pools``; one block id of the group stands for one block in each of them."""
    tokens_per_block: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window in tokens, or None for full attention."""


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
