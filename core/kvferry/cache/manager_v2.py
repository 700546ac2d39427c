"""``KVCacheManagerV2``: a pool a layer group, windows that give blocks back, and tiers below the device."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvferry.cache import suspension
from kvferry.cache.budget import share_out
from kvferry.cache.group_memory import GroupMemory
from kvferry.cache.grouped_blocks import GroupedBlocks, Reservation, Tables
from kvferry.cache.layer_groups import group_shapes
from kvferry.cache.layouts import layout_of_groups
from kvferry.cache.memory import require_device
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
        self._layout = layout_of_groups(spec, shapes, tuple(memory.pool for memory in memories))
        self._memories: list[GroupMemory] | None = memories
        self._blocks = GroupedBlocks(
            shapes,
            memories,
            spec.tokens_per_block,
            reuse=_reuses(spec, self._layout),
            tiers=make_tiers(spec.options, self.shares.block_bytes),
        )
        self._requests: dict[int, RequestBlocks] = {}
        self._moving: set[int] = set()
        """Requests whose blocks are copied from or to the tiers, without the lock."""
        self._settled = threading.Condition()
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
        history_tokens = min(history_tokens, num_tokens)
        with self._settled:
            self._wait_for(request_id)
            if request_id in self._requests:
                raise ValueError(f"request {request_id} has blocks already; free it first")
            self._moving.add(request_id)
        with self._move(request_id):
            while True:
                reservation = self._reserve(num_tokens, token_ids, limit, history_tokens)
                if self._load(reservation):
                    break
            computed = max(reservation.cached_tokens, history_tokens)
            with self._settled:
                self._requests[request_id] = RequestBlocks(reservation.tables, computed)
        return reservation.cached_tokens

    def extend(self, request_id: int, num_tokens: int) -> None:
        groups = self._layout.groups
        with self._settled:
            request = self._active(request_id)
            grown = RequestBlocks(request.tables, request.computed_tokens)
            grown.grow(groups, num_tokens)
            self._require_open()
            self._blocks.fill(grown.tables, grown.ordinals_to_compute(groups, num_tokens))
            request.tables = grown.tables

    def advance(self, request_id: int, computed_tokens: int) -> None:
        with self._settled:
            left = self._active(request_id).advance(self._layout.groups, computed_tokens)
            self._blocks.give_back(left, slid_out=True)

    def suspend(self, request_id: int) -> None:
        with self._settled:
            request = self._active(request_id)
            self._require_open()
            suspension.require_quiet(self._blocks, request.tables)
            self._moving.add(request_id)
        with self._move(request_id):
            saved = suspension.save(self._blocks.offload, request.tables)
            with self._settled:
                suspension.leave(self._blocks, request, saved)

    def resume(self, request_id: int) -> None:
        with self._settled:
            request = self._request(request_id)
            if request.saved is None:
                raise ValueError(f"request {request_id} is not suspended")
            self._require_open()
            loads = suspension.reserve(self._blocks, request)
            self._moving.add(request_id)
        with self._move(request_id):
            try:
                self._blocks.offload.load(loads)
            except BaseException:
                with self._settled:
                    self._free(request_id, request)
                raise
            with self._settled:
                suspension.drop(self._blocks.offload, request.saved)
                request.saved = None

    def block_table(self, request_id: int) -> tuple[BlockIds, ...]:
        with self._settled:
            return tuple(table.copy() for table in self._active(request_id).tables)

    def commit(self, request_id: int, token_ids: Sequence[int]) -> int:
        with self._settled:
            request = self._active(request_id)
            self._require_within(request_id, request.tables, len(token_ids))
            return self._blocks.commit(token_ids, request.whole_tables(self._layout.groups))

    def leave_out(self, request_id: int, leading_tokens: Sequence[int]) -> None:
        with self._settled:
            self._request(request_id).leave_out(leading_tokens)

    def free(self, request_id: int) -> None:
        with self._settled:
            self._free(request_id, self._request(request_id))

    def hold(self, tables: Sequence[BlockIds]) -> None:
        with self._settled:
            present = self._present(tables)
            for pool, blocks in zip(self._blocks.pools, present, strict=True):
                pool.require_in_use(blocks)
            for pool, blocks in zip(self._blocks.pools, present, strict=True):
                pool.hold(blocks)

    def release(self, tables: Sequence[BlockIds]) -> None:
        with self._settled:
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
        with self._settled:
            return replace(
                self._blocks.pools[group].statistics(),
                block_bytes=self._layout.block_bytes(group),
                tiers=self._blocks.offload.statistics(group),
            )

    def shutdown(self) -> None:
        """Let go of the memory (it lives on while somebody has a view) and of what the tiers have; idempotent."""
        with self._settled:
            self._memories = None
            self._settled.wait_for(lambda: not self._moving)
            self._blocks.close()

    def _reserve(self, num_tokens: int, token_ids: Sequence[int], limit: int, history_tokens: int) -> Reservation:
        groups = self._layout.groups
        with self._settled:
            self._require_open()
            match = self._blocks.find(token_ids, limit, history_tokens)
            now = max(match.tokens, history_tokens)
            return self._blocks.reserve(
                match,
                stops=[group.blocks_for(num_tokens if group.window is None else now) for group in groups],
                lengths=[group.blocks_for(num_tokens) for group in groups],
            )

    def _load(self, reservation: Reservation) -> bool:
        """Bring what is known back from the tiers; False = a block was lost, and everything undone."""
        try:
            self._blocks.offload.load(reservation.loads)
        except BaseException as error:
            with self._settled:
                self._blocks.cancel(reservation)
                is_here = any(load.entry is not None and load.entry.is_on_device for load in reservation.loads)
            if not isinstance(error, CorruptBlockError):
                raise
            if not is_here:  # else another request brought it back at the same time
                _log.warning("a cached block is lost, so its tokens will be computed again: %s", error)
            return False
        with self._settled:
            self._blocks.finish(reservation)
        return True

    @contextlib.contextmanager
    def _move(self, request_id: int) -> Iterator[None]:
        """While this is entered, without the lock, who asks for this request waits."""
        try:
            yield
        finally:
            with self._settled:
                self._moving.discard(request_id)
                self._settled.notify_all()

    def _wait_for(self, request_id: int) -> None:
        self._settled.wait_for(lambda: request_id not in self._moving)

    def _free(self, request_id: int, request: RequestBlocks) -> None:
        suspension.drop(self._blocks.offload, request.saved)
        self._blocks.give_back(request.tables)
        del self._requests[request_id]

    def _request(self, request_id: int) -> RequestBlocks:
        self._wait_for(request_id)
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
