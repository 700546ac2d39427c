"""The manager against a model that remembers, for each block, who has it and which prefix its KV belongs to."""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry_plugins.errors import CacheFullError
from kvferry_plugins.types import ManagerSpec, ModelGeometry

BLOCKS, STEP = 10, 2
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)


def fingerprint(prefix: list[int]) -> float:
    """What a block that ends ``prefix`` must hold: a number that no other prefix has."""
    return float(int("1" + "".join(map(str, prefix)), 2))


class Manager(RuleBasedStateMachine):
    requests: Bundle[int] = Bundle("requests")
    holds: Bundle[tuple[int, ...]] = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        geometry = ModelGeometry(1, 1, 1, "float32", (None,))
        self.manager = KVCacheManagerV1(ManagerSpec("V1", geometry, STEP, BLOCKS * STEP, 0.9, True, "cpu"))
        self.contents = self.manager.layer_views(0)[0][:, 0, 0, 0]
        self.prompts: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.held: Counter[int] = Counter()
        self.next_id = 0

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
        full = len(self.prompts[request]) // STEP * STEP
        assert self.manager.commit(request, self.prompts[request]) == full

    @rule(request=requests, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def extend(self, request, more):
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
        self.manager.free(request)
        del self.tables[request], self.prompts[request]

    @rule(target=holds, request=requests)
    def hold(self, request):
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


TestManagerStateMachine = Manager.TestCase
TestManagerStateMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
