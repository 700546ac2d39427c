"""``KVCacheManagerV1``: one dense pool for all layers, paged, with prefix reuse."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvferry.cache.layouts import uniform_layout
from kvferry.cache.memory import allocate_memory, choose_pool_size, require_device, torch_dtype
from kvferry.cache.prefix_pool import PrefixPool
from kvferry_plugins.kv_cache import CacheStatistics, KVCacheManager
from kvferry_plugins.layout import BlockIds, KvLayout
from kvferry_plugins.types import ManagerSpec

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class KVCacheManagerV1(KVCacheManager):
    """All layers in one group and one pool, so that a block is one run of bytes.

    Every layer keeps all tokens; a sliding window is left to the attention.

    Args:
        spec: geometry, capacity and device. ``max_tokens`` is rounded up to whole blocks; without it the pool takes
            ``free_memory_fraction`` of the free memory, on a CPU at most ``memory.CPU_POOL_LIMIT``.

    Raises:
        ConfigError: the dtype is unknown, or the device cannot give the memory.
    """

    kind: ClassVar[str] = "V1"

    def __init__(self, spec: ManagerSpec) -> None:
        planned = uniform_layout(spec)
        dtype, (shape,) = torch_dtype(spec.geometry.dtype), planned.pools
        self.pool_size = choose_pool_size(spec, shape.block_stride)
        self._memory: torch.Tensor | None = allocate_memory(
            self.pool_size.num_blocks * shape.block_stride, require_device(spec.device), shared=spec.shared
        )
        pool = replace(shape, base=self._memory.data_ptr(), num_blocks=self.pool_size.num_blocks)
        self._layout = replace(planned, pools=(pool,))
        self._tensor: torch.Tensor | None = self._memory.view(dtype).view(_tensor_shape(spec, pool.num_blocks))
        self._tokens_per_block = spec.tokens_per_block
        self._blocks = PrefixPool(pool.num_blocks, spec.tokens_per_block, reuse=spec.enable_block_reuse)
        self._tables: dict[int, BlockIds] = {}
        self._lock = threading.Lock()
        _log.info("KVCacheManagerV1 on %s: %s", spec.device, self.pool_size)
        if spec.options.get("max_attention_window"):
            _log.warning("kv_cache_config.max_attention_window has no effect: KVCacheManagerV1 keeps every token")

    @property
    def layout(self) -> KvLayout:
        """Where the blocks are, with addresses."""
        return self._layout

    def allocate(
        self,
        request_id: int,
        num_tokens: int,
        token_ids: Sequence[int] = (),
        *,
        max_cached_tokens: int | None = None,
        history_tokens: int = 0,
    ) -> int:
        """Give a new request its blocks; see ``KVCacheManager.allocate``. Every layer keeps all tokens."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {num_tokens}")
        limit = num_tokens if max_cached_tokens is None else min(max_cached_tokens, num_tokens)
        with self._lock:
            if request_id in self._tables:
                raise ValueError(f"request {request_id} has blocks already; free it first")
            self._require_open()
            table, shared = self._blocks.acquire(
                self._blocks_for(num_tokens), token_ids, max(0, limit) // self._tokens_per_block
            )
            self._tables[request_id] = table
        return shared * self._tokens_per_block

    def extend(self, request_id: int, num_tokens: int) -> None:
        """Grow a request's capacity to at least ``num_tokens`` tokens; see ``KVCacheManager.extend``."""
        with self._lock:
            table = self._table(request_id)
            missing = self._blocks_for(num_tokens) - len(table)
            if missing > 0:
                self._require_open()
                grown = self._blocks.grow(missing, after=int(table[-1]))
                self._tables[request_id] = np.concatenate((table, grown))

    def block_table(self, request_id: int) -> tuple[BlockIds, ...]:
        """The request's block ids in token order, int32[n]; a copy. Raises KeyError."""
        with self._lock:
            return (self._table(request_id).copy(),)

    def commit(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Offer full blocks for reuse; see ``KVCacheManager.commit``.

        Raises:
            KeyError: no such request.
            ValueError: more full blocks than the request has, or other tokens than it committed before.
        """
        full = len(token_ids) // self._tokens_per_block
        with self._lock:
            table = self._table(request_id)
            if full > len(table):
                raise ValueError(f"request {request_id} has {len(table)} blocks; {full} full ones cannot be committed")
            return self._blocks.commit(token_ids, table[:full]) * self._tokens_per_block

    def free(self, request_id: int) -> None:
        """Give the request's blocks back. Raises KeyError."""
        with self._lock:
            self._blocks.give_back(self._table(request_id))
            del self._tables[request_id]

    def hold(self, tables: Sequence[BlockIds]) -> None:
        """Add a reference to each block (−1 is skipped). Raises ValueError if one is not in use."""
        with self._lock:
            blocks = _only_table(tables)
            self._blocks.require_in_use(blocks)
            self._blocks.hold(blocks)

    def release(self, tables: Sequence[BlockIds]) -> None:
        """Undo one ``hold``. Raises ValueError if a block is not held."""
        with self._lock:
            blocks = _only_table(tables)
            self._blocks.require_held(blocks)
            self._blocks.release(blocks)

    def role_views(self, layer: int) -> "dict[str, torch.Tensor]":
        """Key and value of a layer, each ``[num_blocks, kv_heads, tokens_per_block, head_dim]``, views of the pool."""
        tensor = self._require_open()
        layers = self._layout.groups[0].layers
        if layer not in layers:
            raise IndexError(f"layer {layer} is outside {layers[0]} … {layers[-1]}")
        position = layer - layers[0]
        return {"key": tensor[:, position, 0], "value": tensor[:, position, 1]}

    def statistics(self, group: int = 0) -> CacheStatistics:
        """Count the blocks of the only group."""
        if group != 0:
            raise IndexError(f"group {group} does not exist; KVCacheManagerV1 has one group, 0")
        with self._lock:
            return replace(self._blocks.statistics(), block_bytes=self.pool_size.block_bytes)

    def shutdown(self) -> None:
        """Let go of the memory (it lives on while somebody has a view); idempotent."""
        with self._lock:
            self._memory = self._tensor = None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tokens_per_block)

    def _table(self, request_id: int) -> BlockIds:
        try:
            return self._tables[request_id]
        except KeyError:
            raise KeyError(f"request {request_id} has no blocks here") from None

    def _require_open(self) -> "torch.Tensor":
        if self._tensor is None:
            raise RuntimeError("this KVCacheManagerV1 was shut down")
        return self._tensor


def _only_table(tables: Sequence[BlockIds]) -> BlockIds:
    if len(tables) != 1:
        raise ValueError(f"{len(tables)} block tables; KVCacheManagerV1 has one group, so it takes exactly one")
    table: BlockIds = np.asarray(tables[0], dtype=np.int32)
    present: BlockIds = table[table != -1]
    return present


def _tensor_shape(spec: ManagerSpec, num_blocks: int) -> tuple[int, ...]:
    geometry = spec.geometry
    return (num_blocks, geometry.num_layers, 2, geometry.kv_heads, spec.tokens_per_block, geometry.head_dim)
