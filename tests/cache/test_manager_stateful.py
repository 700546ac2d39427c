"""The managers against a model that remembers, for each block, who has it and which prefix its KV belongs to."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.cache.manager_v2 import KVCacheManagerV2
from kvferry_plugins.errors import CacheFullError
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.types import ManagerSpec, ModelGeometry

BLOCKS, STEP = 10, 2
SPEC = ManagerSpec("V1", ModelGeometry(1, 1, 1, "float32", (None,)), STEP, BLOCKS * STEP, 0.9, True, "cpu")
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def fingerprint(prefix: list[int]) -> float:
    """What a block that ends ``prefix`` must hold: a number that no other prefix has."""
    return float(int("1" + "".join(map(str, prefix)), 2))


class V1(RuleBasedStateMachine):
    requests: Bundle[int] = Bundle("requests")
    holds: Bundle[tuple[int, ...]] = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.manager = self.make()
        self.contents = self.manager.layer_views(0)[0][:, 0, 0, 0]
        self.prompts: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.held: Counter[int] = Counter()
        self.next_id = 0

    def make(self) -> KVCacheManager:
        return KVCacheManagerV1(SPEC)

    def is_here(self, request: int) -> bool:
        return True

    def owners(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table) + self.held

    def fill(self, request: int, start: int) -> None:
        prompt = self.prompts[request]
        for position in range(start // STEP, len(prompt) // STEP):
            self.contents[self.tables[request][position]] = fingerprint(prompt[: (position + 1) * STEP])

    @rule(target=requests, prompt=tokens, extra=st.integers(0, 4), limited=st.booleans())
    def allocate(self, prompt, extra, limited):
        request, self.next_id = self.next_id, self.next_id + 1
        before = self.manager.statistics()
        capacity = len(prompt) + extra
        try:
            cached = self.manager.allocate(
                request, capacity, prompt, max_cached_tokens=len(prompt) - 1 if limited else None
            )
        except CacheFullError:
            assert self.manager.statistics() == before
            return multiple()
        table = self.manager.block_table(request)[0].tolist()
        assert len(table) == -(-capacity // STEP)
        assert cached % STEP == 0
        assert cached <= len(prompt) - limited
        fresh = table[cached // STEP :]
        assert not set(fresh) & set(self.owners()), "a fresh block has an owner already"
        for position in range(cached // STEP):
            assert self.contents[table[position]] == fingerprint(prompt[: (position + 1) * STEP])
        self.prompts[request], self.tables[request] = prompt, table
        self.contents[np.array(fresh, dtype=np.int64)] = -1.0
        self.fill(request, cached)
        return request

    @rule(request=requests)
    def commit(self, request):
        if not self.is_here(request):
            return
        full = len(self.prompts[request]) // STEP * STEP
        assert self.manager.commit(request, self.prompts[request]) == full

    @rule(request=requests, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, request, more):
        if not self.is_here(request):
            return
        prompt = self.prompts[request] + more
        before = self.manager.statistics()
        try:
            self.manager.extend(request, len(prompt))
        except CacheFullError:
            assert self.manager.statistics() == before
            assert self.manager.block_table(request)[0].tolist() == self.tables[request]
            return
        old, table = self.tables[request], self.manager.block_table(request)[0].tolist()
        assert table[: len(old)] == old
        assert not set(table[len(old) :]) & set(self.owners())
        start = len(self.prompts[request]) // STEP * STEP
        self.prompts[request], self.tables[request] = prompt, table
        self.fill(request, start)

    @rule(request=consumes(requests))
    def free(self, request):
        if not self.is_here(request):
            return
        self.manager.free(request)
        del self.tables[request], self.prompts[request]

    @rule(target=holds, request=requests)
    def hold(self, request):
        if not self.is_here(request):
            return ()
        table = self.tables[request]
        self.manager.hold([np.array([-1, *table], dtype=np.int32)])
        self.held.update(table)
        return tuple(table)

    @rule(table=consumes(holds))
    def release(self, table):
        self.manager.release([np.array(table, dtype=np.int32)])
        self.held -= Counter(table)

    @invariant()
    def every_block_is_counted_once(self):
        figures = self.manager.statistics()
        assert figures.total == BLOCKS == figures.free + figures.cached + figures.in_use
        assert figures.in_use == len(self.owners())

    @invariant()
    def what_a_request_wrote_is_still_there(self):
        for request, table in self.tables.items():
            prompt = self.prompts[request]
            for position in range(len(prompt) // STEP):
                assert self.contents[table[position]] == fingerprint(prompt[: (position + 1) * STEP])

    def teardown(self):
        for request in list(self.tables):
            self.free(request)
        if self.held:
            self.manager.release([np.array(list(self.held.elements()), dtype=np.int32)])
        figures = self.manager.statistics()
        assert (figures.in_use, figures.free + figures.cached) == (0, BLOCKS)
        self.manager.allocate(self.next_id, BLOCKS * STEP)
        assert sorted(self.manager.block_table(self.next_id)[0].tolist()) == list(range(BLOCKS))


class V2(V1):
    def make(self) -> KVCacheManager:
        return KVCacheManagerV2(SPEC)


class V2WithTiers(V1):
    """What is evicted comes back from a host tier that holds less than half of it."""

    def make(self) -> KVCacheManager:
        return KVCacheManagerV2(replace(SPEC, options={"host_cache_size": 4 * 16}))

    def __init__(self) -> None:
        super().__init__()
        self.suspended: dict[int, list[int]] = {}

    def is_here(self, request: int) -> bool:
        return request not in self.suspended

    @rule(request=V1.requests)
    def suspend(self, request):
        if not self.is_here(request):
            return
        before = self.tables[request]
        try:
            self.manager.suspend(request)
        except (CacheFullError, ValueError):
            assert self.manager.block_table(request)[0].tolist() == before
            return
        self.suspended[request] = self.prompts.pop(request)
        del self.tables[request]

    @rule(request=V1.requests)
    def resume(self, request):
        if self.is_here(request):
            return
        try:
            self.manager.resume(request)
        except CacheFullError:
            return
        self.prompts[request] = self.suspended.pop(request)
        self.tables[request] = self.manager.block_table(request)[0].tolist()

    @rule(request=consumes(V1.requests))
    def free_suspended(self, request):
        if self.is_here(request):
            self.free(request)
        else:
            self.manager.free(request)
            del self.suspended[request]

    def teardown(self):
        for request in list(self.suspended):
            self.free_suspended(request)
        super().teardown()
        assert self.manager.statistics().tiers[0].blocks <= 4


FEW = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestV1, TestV2, TestV2WithTiers = V1.TestCase, V2.TestCase, V2WithTiers.TestCase
TestV1.settings = TestV2.settings = TestV2WithTiers.settings = FEW
