"""Where the tokens of one request are: a layer group's block table as tensors, for the steps of one cache."""

import numpy as np
import torch  # noqa: TID253

from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.layout import LayerGroup


class RequestBlocks:
    """The block tables of one request: asked for once a step, whatever the number of layers."""

    def __init__(self, manager: KVCacheManager, request_id: int) -> None:
        self._manager = manager
        self._request_id = request_id
        self._ready = -1
        self.version = 0
        """Grows when ``tables`` may have changed."""
        self.tables = manager.block_table(request_id)

    def prepare(self, stop: int) -> None:
        """Make room for the tokens before ``stop``; the tables hold until the next call.

        Raises:
            CacheFullError: no block is left; nothing was changed.
            KeyError: the request is gone.
        """
        self._manager.extend(self._request_id, stop)
        self.tables = self._manager.block_table(self._request_id)
        self.version += 1
        self._ready = stop

    def reach(self, stop: int) -> None:
        """``prepare``, unless that was done for this step: transformers' own ``generate`` does not."""
        if stop != self._ready:
            self.prepare(stop)


class BlockSlots:
    """Where the layers of one group that share a window write and read; every layer of one step asks the same.

    Args:
        blocks: the request's.
        group: index of the layer group.
        layer_group: that group.
        device: of its pools.
        window: what the layers' attention sees, in tokens; None = all.
    """

    def __init__(
        self, blocks: RequestBlocks, group: int, layer_group: LayerGroup, device: str, window: int | None
    ) -> None:
        self._request = blocks
        self._group = group
        self._tokens_per_block = layer_group.tokens_per_block
        self._device = device
        self.window = window
        self._located = (-1, -1, -1)

    def first_visible(self, start: int) -> int:
        """The first token that the query at position ``start`` sees."""
        return 0 if self.window is None else max(0, start + 1 - self.window)

    def locate(self, start: int, stop: int) -> None:
        """Prepare ``write`` and ``gather`` for the step that computes the tokens ``start`` … ``stop``.

        Raises:
            CacheFullError: no block is left; nothing was written.
        """
        self._request.reach(stop)
        if (start, stop, self._request.version) == self._located:
            return
        size, first = self._tokens_per_block, self.first_visible(start)
        needed = self._request.tables[self._group][first // size : -(-stop // size)].astype(np.int64)
        if len(needed) < -(-stop // size) - first // size or (needed < 0).any():
            raise RuntimeError(
                f"the manager gave no block for some of the tokens {first} … {stop - 1} of group {self._group}, which "
                "this step reads; that is an error of the manager"
            )
        ids = torch.from_numpy(needed).to(self._device)
        consecutive = bool((np.diff(needed) == 1).all())
        tokens = torch.arange(start, stop, device=self._device)
        self._blocks = ids[tokens // size - first // size]
        self._positions = tokens % size
        # A slice copies without an index.
        self._used = slice(int(needed[0]), int(needed[-1]) + 1) if consecutive else ids
        self._visible = slice(first % size, first % size + stop - first)
        self._located = (start, stop, self._request.version)

    def write(self, view: torch.Tensor, rows: torch.Tensor) -> None:
        """Put the step's rows ``[1, heads, tokens, width]`` into the pool's ``[blocks, heads, tokens, width]``."""
        view[self._blocks, :, self._positions] = rows[0].transpose(0, 1)

    def gather(self, view: torch.Tensor) -> torch.Tensor:
        """Copy what the step's first query and its successors see, ``[1, heads, tokens, width]``."""
        _, heads, _, width = view.shape
        # Not index_select: it would first copy the whole pool's layer, whose strides it does not take.
        return view.transpose(0, 1)[:, self._used].reshape(1, heads, -1, width)[:, :, self._visible]
