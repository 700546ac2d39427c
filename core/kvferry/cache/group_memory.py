"""The memory of one layer group: views for the model, and single blocks as bytes for the tiers below."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.cache.layer_groups import GroupShape
from kvferry.cache.memory import allocate_memory, torch_dtype
from kvferry_plugins.layout import BlockIds, Pool, RoleView

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]


class GroupMemory:
    """One dense pool.

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

    @property
    def block_stride(self) -> int:
        """Bytes of one block."""
        return self._shape.block_stride

    def role_views(self, layer: int) -> "dict[str, torch.Tensor]":
        """A layer's roles, each ``[num_blocks, heads, tokens, width]``, views of the pool."""
        return {view.role: self._view(view) for view in self.pool.views if view.layer == layer}

    def zero(self, blocks: BlockIds) -> None:
        """Fill blocks with zeros; they are when it returns."""
        import torch

        self._blocks[torch.from_numpy(blocks).to(self._blocks.device, torch.int64)] = 0
        if self._memory.is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()

    def read(self, block: int) -> Bytes:
        """A block's bytes, uint8[block_stride]; valid until the next call."""
        if self._copier is not None:
            return self._copier.read(block)
        data: Bytes = self._blocks[block].numpy()
        return data

    def write(self, block: int, data: Bytes) -> None:
        """Overwrite a block; its bytes are there when it returns."""
        if self._copier is not None:
            self._copier.write(block, data)
        else:
            self._blocks[block].numpy()[:] = data

    def _view(self, view: RoleView) -> "torch.Tensor":
        typed = self._memory.view(torch_dtype(self._shape.dtypes[view.role]))
        item = typed.element_size()
        size = (self.pool.num_blocks, view.heads, view.tokens, view.row_bytes // item)
        strides = (self.pool.block_stride // item, view.head_stride // item, view.token_stride // item, 1)
        return typed.as_strided(size, strides, view.offset // item)


class _Copier:
    """Single blocks between a GPU and pinned memory, on a stream of its own: the model's kernels are not waited for."""

    def __init__(self, blocks: "torch.Tensor") -> None:
        import torch

        self._blocks = blocks
        self._staging = torch.empty(blocks.shape[1], dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]

    def read(self, block: int) -> Bytes:
        self._copy(self._staging, self._blocks[block])
        data: Bytes = self._staging.numpy()
        return data

    def write(self, block: int, data: Bytes) -> None:
        self._staging.numpy()[:] = data
        self._copy(self._blocks[block], self._staging)

    def _copy(self, to: "torch.Tensor", source: "torch.Tensor") -> None:
        import torch

        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()
