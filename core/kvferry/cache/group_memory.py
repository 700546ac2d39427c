"""The memory of one layer group: views for the model, and single blocks as bytes for the tiers below."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.cache.layer_groups import GroupShape
from kvferry.cache.memory import allocate_memory, torch_dtype
from kvferry_plugins.layout import BlockIds, Pool, RoleView

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]
_T = TypeVar("_T")


class GroupMemory:
    """One dense pool. Blocks of which each is somebody's may be read and written in several threads.

    Args:
        shape: the group and its blocks.
        num_blocks: how many.
        device: ``cpu`` or ``cuda:N``.
        shared: on a CPU, where another process of the host can map it.

    Raises:
        ConfigError: the device cannot give the memory.
    """

    def __init__(self, shape: GroupShape, num_blocks: int, device: str, *, shared: bool) -> None:
        self._memory = allocate_memory(num_blocks * shape.block_stride, device, shared=shared)
        self._shape = shape
        self._blocks = self._memory.view(num_blocks, shape.block_stride)
        self._copier = _Copier(self._blocks) if self._memory.is_cuda else None
        self.pool = Pool(self._memory.data_ptr(), shape.block_stride, num_blocks, shape.views, device)

    def role_views(self, layer: int) -> "dict[str, torch.Tensor]":
        """A layer's roles, each ``[num_blocks, heads, tokens, width]``, views of the pool."""
        return {view.role: self._view(view) for view in self.pool.views if view.layer == layer}

    def zero(self, blocks: BlockIds) -> None:
        """Fill blocks with zeros; they are when it returns."""
        import torch

        self._blocks[torch.from_numpy(blocks).to(self._blocks.device, torch.int64)] = 0
        if self._memory.is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()

    def read(self, block: int, use: Callable[[Bytes], _T]) -> _T:
        """Call ``use`` with a block's bytes, uint8[block_stride], which are valid until it returns; its result."""
        if self._copier is not None:
            return self._copier.read(block, use)
        return use(self._blocks[block].numpy())

    def write(self, block: int, fill: Callable[[Bytes], None]) -> None:
        """Have ``fill`` put a block's bytes into uint8[block_stride]; they are in the block when it returns."""
        if self._copier is not None:
            self._copier.write(block, fill)
        else:
            fill(self._blocks[block].numpy())

    def _view(self, view: RoleView) -> "torch.Tensor":
        typed = self._memory.view(torch_dtype(self._shape.dtypes[view.role]))
        item = typed.element_size()
        size = (self.pool.num_blocks, view.heads, view.tokens, view.row_bytes // item)
        strides = (self.pool.block_stride // item, view.head_stride // item, view.token_stride // item, 1)
        return typed.as_strided(size, strides, view.offset // item)


class _Copier:
    """Single blocks between a GPU and pinned memory, on a stream of its own: no kernel of the model is waited for."""

    def __init__(self, blocks: "torch.Tensor") -> None:
        import torch

        self._blocks = blocks
        self._staging = torch.empty(blocks.shape[1], dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()

    def read(self, block: int, use: Callable[[Bytes], _T]) -> _T:
        with self._lock:
            self._copy(self._staging, self._blocks[block])
            return use(self._staging.numpy())

    def write(self, block: int, fill: Callable[[Bytes], None]) -> None:
        with self._lock:
            fill(self._staging.numpy())
            self._copy(self._blocks[block], self._staging)

    def _copy(self, to: "torch.Tensor", source: "torch.Tensor") -> None:
        import torch

        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()
