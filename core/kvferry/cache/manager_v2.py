"""``KVCacheManagerV2``: a pool a layer group, windows that give blocks back, and tiers below the device."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvferry.cache import suspension
from kvferry.cache.budget import share_out
from kvferry.cache.group_memory import GroupMemory
from kvferry.cache.grouped_blocks import GroupedBlocks, Tables
from kvferry.cache.layer_groups import group_shapes
from kvferry.cache.memory import require_device
from kvferry.cache.prefix_match import PrefixMatch
from kvferry.cache.prefix_tree import NOT_HERE
from kvferry.cache.request_blocks import RequestBlocks
from kvferry.cache.tiers import make_tiers
from kvferry_plugins.errors import CorruptBlockError
from kvferry_plugins.kv_cache import CacheStatistics, KVCacheManager
from kvferry_plugins.layout import BlockIds, KvLayout
from kvferry_plugins.types import ManagerSpec

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class KVCacheManagerV2(KVCacheManager):
    """Layers in groups by life cycle: full attention, a sliding window, latents, states.

    Of a sliding window only the blocks that are still read stay with a request. All pools share one budget; see
    ``kvferry.cache.budget``. With states no prefix is reused, since no snapshot of them is kept.

    Args:
        spec: geometry, capacity and device; of its ``options`` those of ``kvferry.cache.tiers.make_tiers``.

    Raises:
        ConfigError: a dtype is unknown, or the budget, the device or a tier cannot hold a block of every group.
    """

    kind: ClassVar[str] = "V2"

    def __init__(self, spec: ManagerSpec) -> None:
        shapes = group_shapes(spec.geometry, spec.tokens_per_block)
        self.shares = share_out(spec, shapes)
        device = require_device(spec.device)
        memories = [
            GroupMemory(shape, num_blocks, device, shared=spec.shared)
            for shape, num_blocks in zip(shapes, self.shares.num_blocks, strict=True)
        ]
        self._layout = KvLayout(
            spec.geometry.dtype, tuple(shape.group for shape in shapes), tuple(memory.pool for memory in memories)
        )
        self._memories: list[GroupMemory] | None = memories
        self._blocks = GroupedBlocks(
            shapes,
            memories,
            spec.tokens_per_block,
            reuse=_reuses(spec, self._layout),
            tiers=make_tiers(spec.options, self.shares.block_bytes),
        )
        self._requests: dict[int, RequestBlocks] = {}
        self._lock = threading.Lock()
        _log.info("KVCacheManagerV2 on %s: %s", spec.device, self.shares)

    @property
    def layout(self) -> KvLayout:
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
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {num_tokens}")
        limit = num_tokens if max_cached_tokens is None else min(max_cached_tokens, num_tokens)
        with self._lock:
            if request_id in self._requests:
                raise ValueError(f"request {request_id} has blocks already; free it first")
            self._require_open()
            match, tables = self._place(num_tokens, token_ids, limit, min(history_tokens, num_tokens))
            self._requests[request_id] = RequestBlocks(tables, max(match.tokens, min(history_tokens, num_tokens)))
        return match.tokens

    def extend(self, request_id: int, num_tokens: int) -> None:
        groups = self._layout.groups
        with self._lock:
            request = self._active(request_id)
            grown = RequestBlocks(request.tables, request.computed_tokens)
            grown.grow(groups, num_tokens)
            self._require_open()
            self._blocks.fill(grown.tables, grown.ordinals_to_compute(groups, num_tokens))
            request.tables = grown.tables

    def advance(self, request_id: int, computed_tokens: int) -> None:
        with self._lock:
            left = self._active(request_id).advance(self._layout.groups, computed_tokens)
            self._blocks.give_back(left, slid_out=True)

    def suspend(self, request_id: int) -> None:
        with self._lock:
            request = self._active(request_id)
            self._require_open()
            suspension.suspend(self._blocks, request)

    def resume(self, request_id: int) -> None:
        with self._lock:
            request = self._request(request_id)
            if request.saved is None:
                raise ValueError(f"request {request_id} is not suspended")
            self._require_open()
            try:
                suspension.resume(self._blocks, request)
            except CorruptBlockError:
                del self._requests[request_id]
                raise

    def block_table(self, request_id: int) -> tuple[BlockIds, ...]:
        with self._lock:
            return tuple(table.copy() for table in self._active(request_id).tables)

    def commit(self, request_id: int, token_ids: Sequence[int]) -> int:
        with self._lock:
            tables = self._active(request_id).tables
            self._require_within(request_id, tables, len(token_ids))
            return self._blocks.commit(token_ids, tables)

    def free(self, request_id: int) -> None:
        with self._lock:
            request = self._request(request_id)
            suspension.drop(self._blocks, request)
            self._blocks.give_back(request.tables)
            del self._requests[request_id]

    def hold(self, tables: Sequence[BlockIds]) -> None:
        with self._lock:
            present = self._present(tables)
            for pool, blocks in zip(self._blocks.pools, present, strict=True):
                pool.require_in_use(blocks)
            for pool, blocks in zip(self._blocks.pools, present, strict=True):
                pool.hold(blocks)

    def release(self, tables: Sequence[BlockIds]) -> None:
        with self._lock:
            present = self._present(tables)
            for pool, blocks in zip(self._blocks.pools, present, strict=True):
                pool.require_held(blocks)
            for pool, blocks in zip(self._blocks.pools, present, strict=True):
                pool.release(blocks)

    def role_views(self, layer: int) -> "dict[str, torch.Tensor]":
        memories = self._require_open()
        try:
            group = self._layout.group_of(layer)
        except KeyError as error:
            known = sorted(each for group in self._layout.groups for each in group.layers)
            raise IndexError(f"layer {layer} is outside {known[0]} … {known[-1]}") from error
        return memories[group].role_views(layer)

    def statistics(self, group: int = 0) -> CacheStatistics:
        if not 0 <= group < len(self._layout.groups):
            raise IndexError(f"group {group} does not exist; there are groups 0 … {len(self._layout.groups) - 1}")
        with self._lock:
            return replace(
                self._blocks.pools[group].statistics(),
                block_bytes=self._layout.block_bytes(group),
                tiers=self._blocks.offload.statistics(group),
            )

    def shutdown(self) -> None:
        """Let go of the memory (it lives on while somebody has a view) and of what the tiers have; idempotent."""
        with self._lock:
            self._memories = None
            self._blocks.close()

    def _place(
        self, num_tokens: int, token_ids: Sequence[int], limit: int, history_tokens: int
    ) -> tuple[PrefixMatch, Tables]:
        """Find what is known and give the rest; a block that does not come back whole makes the prefix shorter."""
        groups = self._layout.groups
        lengths = [group.blocks_for(num_tokens) for group in groups]
        while True:
            match = self._blocks.find(token_ids, limit, history_tokens)
            now = max(match.tokens, history_tokens)
            stops = [group.blocks_for(num_tokens if group.window is None else now) for group in groups]
            try:
                return match, self._blocks.place(match, stops, lengths)
            except CorruptBlockError as error:
                _log.warning("a cached block is lost, and its tokens will be computed again: %s", error)

    def _request(self, request_id: int) -> RequestBlocks:
        try:
            return self._requests[request_id]
        except KeyError:
            raise KeyError(f"request {request_id} has no blocks here") from None

    def _active(self, request_id: int) -> RequestBlocks:
        request = self._request(request_id)
        if request.saved is not None:
            raise ValueError(f"request {request_id} is suspended; resume it first")
        return request

    def _require_within(self, request_id: int, tables: Tables, num_tokens: int) -> None:
        for group, table in zip(self._layout.groups, tables, strict=True):
            full = num_tokens // group.tokens_per_block
            if group.kind != "state" and full > len(table):
                raise ValueError(f"request {request_id} has {len(table)} blocks; {full} full ones cannot be committed")

    def _present(self, tables: Sequence[BlockIds]) -> Tables:
        groups = len(self._layout.groups)
        if len(tables) != groups:
            raise ValueError(f"{len(tables)} block tables for {groups} layer groups; exactly one each is needed")
        arrays = [np.asarray(table, dtype=np.int32) for table in tables]
        return [table[table != NOT_HERE] for table in arrays]

    def _require_open(self) -> list[GroupMemory]:
        if self._memories is None:
            raise RuntimeError("this KVCacheManagerV2 was shut down")
        return self._memories


def _reuses(spec: ManagerSpec, layout: KvLayout) -> bool:
    if not spec.enable_block_reuse:
        return False
    if any(group.kind == "state" for group in layout.groups):
        _log.warning(
            "kv_cache_config.enable_block_reuse is off for this model: it has layers with a state, of which no "
            "snapshot is kept"
        )
        return False
    return True
