"""The suite for a KV-cache manager: references, prefix reuse, and a layout that is the memory it says."""

import ctypes
import threading
from typing import Any, ClassVar

import numpy as np
import pytest

from kvferry_plugins.errors import CacheFullError
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.layout import BlockIds
from kvferry_plugins.testing.conformance.raising import raised_by
from kvferry_plugins.types import ManagerKind, ManagerSpec, ModelGeometry

TOKENS = 4
"""Of a block."""

BLOCKS = 8
PROMPT = tuple(range(100, 110))
"""Two full blocks, and half of a third."""

GEOMETRY = ModelGeometry(num_layers=3, kv_heads=2, head_dim=8, dtype="float32", windows=(None,) * 3)


class KVCacheManagerConformance:
    """Subclass it as ``Test…``, say what your plugin declares, and how a manager is made.

    ::

        class TestAcmeManager(KVCacheManagerConformance):
            declared = acme.kv_cache_managers()[0]

            def make_manager(self, spec):
                return acme.create_kv_cache_manager(spec)

    The model is one of equal attention layers that all keep every token.

    Attributes:
        declared: what the plugin declares.
        device: where the memory is to be.
    """

    declared: ClassVar[ManagerKind]
    device: ClassVar[str] = "cpu"

    def make_manager(self, spec: ManagerSpec) -> KVCacheManager:
        """Return the manager under test."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make_manager(spec)")

    @pytest.fixture
    def manager(self) -> Any:
        """A manager of eight blocks of four tokens."""
        made = self._make()
        yield made
        made.shutdown()

    # --- memory -------------------------------------------------------------------------------------------------

    def test_it_is_of_the_kind_that_its_plugin_declares(self, manager: KVCacheManager) -> None:
        assert manager.kind == self.declared.name, f"kind is {manager.kind!r}, declared is {self.declared.name!r}"

    def test_its_layout_places_every_layer_once_and_within_its_block(self, manager: KVCacheManager) -> None:
        layout = manager.layout
        layers = sorted(layer for group in layout.groups for layer in group.layers)
        assert layers == list(range(GEOMETRY.num_layers)), f"the groups hold layers {layers}"
        for number, pool in enumerate(layout.pools):
            runs = sorted(run for view in pool.views for run in view.runs())
            ends = [offset + nbytes for offset, nbytes in runs]
            assert pool.base > 0, f"pool {number} has no address"
            assert max(ends) <= pool.block_stride, f"pool {number}: a run ends at {max(ends)}, behind its block"
            starts = [offset for offset, _ in runs[1:]]
            overlap = next((start for start, end in zip(starts, ends, strict=False) if start < end), None)
            assert overlap is None, f"pool {number}: two runs share the byte at {overlap}"
        assert layout.num_blocks(0) == BLOCKS, f"it was to have {BLOCKS} blocks, and has {layout.num_blocks(0)}"

    def test_the_views_of_a_layer_are_the_layouts_memory(self, manager: KVCacheManager) -> None:
        for pool in manager.layout.pools:
            for view in pool.views:
                seen = manager.role_views(view.layer)[view.role]
                seen[1].zero_()
                start = pool.base + pool.block_stride + view.offset + (view.heads - 1) * view.head_stride
                ctypes.memset(start + view.token_stride, 0x3F, view.row_bytes)
                touched = seen[1, view.heads - 1, 1]
                assert bool((touched != 0).all()), (
                    f"what is written to the layout's block 1 of layer {view.layer}, {view.role}, is not in its view"
                )
                assert int((seen[1] != 0).sum()) == touched.numel(), (
                    f"other elements of layer {view.layer} changed, too"
                )

    # --- requests -----------------------------------------------------------------------------------------------

    def test_blocks_are_free_cached_or_in_use_and_come_back(self, manager: KVCacheManager) -> None:
        cached = manager.allocate(1, 10)
        assert cached == 0, f"nothing was ever committed, and {cached} tokens are there already"
        self._require(manager, free=5, cached=0, in_use=3)
        assert manager.bytes_in_use() == 3 * manager.layout.block_bytes(0), "bytes_in_use are not those of three blocks"
        manager.free(1)
        self._require(manager, free=8, cached=0, in_use=0)

    def test_a_table_is_a_copy_with_each_block_once(self, manager: KVCacheManager) -> None:
        manager.allocate(1, 10)
        (table,) = manager.block_table(1)
        assert len(set(table.tolist())) == len(table) == 3, f"ten tokens got blocks {table.tolist()}"
        assert table.dtype == np.int32, f"block ids are {table.dtype}, not int32"
        table[:] = 99
        assert 99 not in manager.block_table(1)[0], "whoever changes a table changes the manager's"

    def test_a_request_grows_at_its_end(self, manager: KVCacheManager) -> None:
        manager.allocate(1, 4)
        first = manager.block_table(1)[0].tolist()
        manager.extend(1, 3)
        assert manager.block_table(1)[0].tolist() == first, "extend to what it has changed its table"
        manager.extend(1, 12)
        grown = manager.block_table(1)[0].tolist()
        assert grown[:1] == first and len(grown) == 3, f"extend to 12 tokens made {first} into {grown}"  # noqa: PT018

    @pytest.mark.parametrize("method", ["block_table", "free", "extend", "commit", "advance", "leave_out"])
    def test_an_unknown_request_is_a_key_error(self, manager: KVCacheManager, method: str) -> None:
        rest: dict[str, tuple[Any, ...]] = {"extend": (4,), "commit": ((),), "advance": (0,), "leave_out": ((0,),)}
        error = raised_by(getattr(manager, method), 77, *rest.get(method, ()))
        harmless = error is None and method in ("advance", "leave_out")
        assert harmless or isinstance(error, KeyError), f"{method} of request 77, which is nowhere, raised {error!r}"

    @pytest.mark.parametrize("num_tokens", [0, -1])
    def test_a_request_without_tokens_is_refused(self, manager: KVCacheManager, num_tokens: int) -> None:
        error = raised_by(manager.allocate, 1, num_tokens)
        assert isinstance(error, ValueError), f"allocate for {num_tokens} tokens raised {error!r}, no ValueError"
        self._require(manager, free=8, cached=0, in_use=0)

    def test_a_request_is_allocated_once(self, manager: KVCacheManager) -> None:
        manager.allocate(1, 4)
        error = raised_by(manager.allocate, 1, 4)
        assert isinstance(error, ValueError), f"allocating request 1 again raised {error!r}, no ValueError"
        self._require(manager, free=7, cached=0, in_use=1)

    def test_running_out_tells_the_figures_and_changes_nothing(self, manager: KVCacheManager) -> None:
        manager.allocate(1, 20)
        for call, arguments in ((manager.allocate, (2, 16)), (manager.extend, (1, 36))):
            error = raised_by(call, *arguments)
            assert isinstance(error, CacheFullError), f"{call.__name__}{arguments} with 3 blocks left raised {error!r}"
            figures = (error.needed, error.free, error.total)
            assert figures == (4, 3, 8), f"{call.__name__}: needed, free, total are {figures}, not (4, 3, 8)"
        self._require(manager, free=3, cached=0, in_use=5)
        assert isinstance(raised_by(manager.block_table, 2), KeyError), "the request that got no blocks is known"

    # --- reuse --------------------------------------------------------------------------------------------------

    def test_a_committed_prefix_is_shared(self, manager: KVCacheManager) -> None:
        assert manager.allocate(1, 10, PROMPT) == 0, "reused before anything was committed"
        assert manager.commit(1, PROMPT) == 8, "ten tokens are two full blocks, eight tokens to commit"
        assert manager.commit(1, PROMPT) == 8, "committing again is harmless"
        assert manager.allocate(2, 12, PROMPT) == 8, "the committed eight tokens are there already"
        first, second = manager.block_table(1)[0].tolist(), manager.block_table(2)[0].tolist()
        assert first[:2] == second[:2], f"the prefix has blocks {first[:2]}, and is given as {second[:2]}"
        assert first[2] != second[2], "a block that is not full is shared"
        manager.free(1)
        manager.free(2)
        self._require(manager, free=6, cached=2, in_use=0)
        assert manager.statistics().reused_tokens == 8, f"reused_tokens is {manager.statistics().reused_tokens}"

    def test_reuse_stops_where_the_caller_says(self, manager: KVCacheManager) -> None:
        manager.allocate(1, 8, PROMPT[:8])
        manager.commit(1, PROMPT[:8])
        for number, (limit, expected) in enumerate(((7, 4), (0, 0)), 2):
            reused = manager.allocate(number, 8, PROMPT[:8], max_cached_tokens=limit)
            assert reused == expected, f"at most {limit} tokens were to be reused, and {reused} are"
            manager.free(number)

    def test_without_reuse_nothing_is_shared(self) -> None:
        manager = self._make(enable_block_reuse=False)
        manager.allocate(1, 8, PROMPT[:8])
        manager.commit(1, PROMPT[:8])
        reused = manager.allocate(2, 8, PROMPT[:8])
        assert reused == 0, f"enable_block_reuse is off, and {reused} tokens are reused"
        manager.shutdown()

    def test_what_is_only_cached_makes_room(self, manager: KVCacheManager) -> None:
        manager.allocate(1, 8, PROMPT[:8])
        manager.commit(1, PROMPT[:8])
        manager.free(1)
        error = raised_by(manager.allocate, 2, 8 * TOKENS)
        assert error is None, f"six blocks are free and two only cached, and eight cannot be had: {error!r}"
        self._require(manager, free=0, cached=0, in_use=8)

    # --- holds --------------------------------------------------------------------------------------------------

    def test_a_held_block_outlives_its_request(self, manager: KVCacheManager) -> None:
        manager.allocate(1, 8)
        table = manager.block_table(1)
        manager.hold(table)
        manager.hold([_ids(-1, int(table[0][0]))])
        manager.free(1)
        self._require(manager, free=6, cached=0, in_use=2)
        manager.release(table)
        self._require(manager, free=7, cached=0, in_use=1)
        manager.release([table[0][:1]])
        self._require(manager, free=8, cached=0, in_use=0)

    def test_only_what_is_in_use_is_held_and_only_what_is_held_released(self, manager: KVCacheManager) -> None:
        manager.allocate(1, 4)
        block = int(manager.block_table(1)[0][0])
        other = (block + 1) % BLOCKS
        for call, blocks in ((manager.hold, (block, other)), (manager.hold, (BLOCKS,)), (manager.release, (block,))):
            error = raised_by(call, [_ids(*blocks)])
            assert isinstance(error, ValueError), f"{call.__name__} of blocks {blocks} raised {error!r}, no ValueError"
        manager.free(1)
        self._require(manager, free=8, cached=0, in_use=0)

    def test_many_threads_lose_no_block(self, manager: KVCacheManager) -> None:
        failures: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for request in range(first, first + 40):
                    self._come_and_go(manager, request)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, f"four threads at once: {failures[0]!r}"
        figures = manager.statistics()
        assert figures.in_use == 0, f"every request was freed, and {figures.in_use} blocks are in use"

    # --- tiers and the end --------------------------------------------------------------------------------------

    def test_suspending_is_refused_by_a_manager_that_declares_no_tiers(self, manager: KVCacheManager) -> None:
        if not self.declared.tiers:
            manager.allocate(1, 4)
            error = raised_by(manager.suspend, 1)
            assert isinstance(error, NotImplementedError), f"it declares no tiers, and suspend raised {error!r}"

    def test_shutdown_is_idempotent_and_final(self, manager: KVCacheManager) -> None:
        manager.allocate(1, 4)
        for time in ("first", "second"):
            error = raised_by(manager.shutdown)
            assert error is None, f"the {time} shutdown raised {error!r}"
        error = raised_by(manager.allocate, 2, 4)
        assert error is not None, "a manager that is shut down gives blocks"

    # --- helpers ------------------------------------------------------------------------------------------------

    def _make(self, **changes: Any) -> KVCacheManager:
        fields: dict[str, Any] = {
            "kind": self.declared.name,
            "geometry": GEOMETRY,
            "tokens_per_block": TOKENS,
            "max_tokens": BLOCKS * TOKENS,
            "free_memory_fraction": 0.5,
            "enable_block_reuse": True,
            "device": self.device,
        }
        return self.make_manager(ManagerSpec(**(fields | changes)))

    @staticmethod
    def _come_and_go(manager: KVCacheManager, request: int) -> None:
        manager.allocate(request, 8, PROMPT[:8])
        manager.commit(request, PROMPT[:8])
        table = manager.block_table(request)
        manager.hold(table)
        manager.free(request)
        manager.release(table)

    @staticmethod
    def _require(manager: KVCacheManager, *, free: int, cached: int, in_use: int) -> None:
        figures = manager.statistics()
        found = {"free": figures.free, "cached": figures.cached, "in_use": figures.in_use}
        expected = {"free": free, "cached": cached, "in_use": in_use}
        assert found == expected, f"of {figures.total} blocks {found}, expected {expected}"


def _ids(*blocks: int) -> BlockIds:
    return np.array(blocks, dtype=np.int32)
