"""The kit's manager with one fault each."""

from collections import Counter
from dataclasses import replace

import numpy as np

from kvferry_plugins.errors import CacheFullError
from kvferry_plugins.testing.managers import FakeManager
from kvferry_plugins.types import ManagerKind

DECLARED = ManagerKind("FAKE", "FakeManager")


class HandsOutItsTable(FakeManager):
    def __init__(self, spec):
        super().__init__(spec)
        self.given = {}

    def block_table(self, request_id):
        return self.given.setdefault(request_id, super().block_table(request_id))


class LeaksWhenFull(FakeManager):
    def allocate(self, request_id, num_tokens, token_ids=(), **how):
        try:
            return super().allocate(request_id, num_tokens, token_ids, **how)
        except CacheFullError:
            self._references.update([next(block for block in range(8) if not self._references[block])])
            raise


class HoldsAnything(FakeManager):
    def hold(self, tables):
        self._references.update(self._present(tables))
        self._holds.update(self._present(tables))


class IgnoresTheLimit(FakeManager):
    def allocate(self, request_id, num_tokens, token_ids=(), *, max_cached_tokens=None, history_tokens=0):
        return super().allocate(request_id, num_tokens, token_ids)


class CommitsHalfABlock(FakeManager):
    def commit(self, request_id, token_ids):
        super().commit(request_id, token_ids)
        return len(token_ids)


class FreesHeldBlocks(FakeManager):
    def free(self, request_id):
        for block in self._table(request_id):
            self._references[block], self._holds[block] = 1, 0
        super().free(request_id)


class ForgivesStrangers(FakeManager):
    def free(self, request_id):
        if request_id in self._tables:
            super().free(request_id)


class LiesAboutItsMemory(FakeManager):
    def __init__(self, spec):
        super().__init__(spec)
        self.copy = np.zeros_like(self.memory)
        (pool,) = self._layout.pools
        self._layout = replace(self._layout, pools=(replace(pool, base=self.copy.ctypes.data),))


class ReusesAlways(FakeManager):
    def __init__(self, spec):
        super().__init__(replace(spec, enable_block_reuse=True))


class EvictsNothing(FakeManager):
    def _evictable(self, *, keep):
        return []

    def statistics(self, group=0):
        figures = super().statistics(group)
        cached = Counter(self._prefixes.values())
        idle = sum(not self._references[block] for block in cached)
        return replace(figures, free=figures.free - idle, cached=idle)


FAULTS = {
    "hands out its table": HandsOutItsTable,
    "leaks when full": LeaksWhenFull,
    "holds anything": HoldsAnything,
    "ignores the limit": IgnoresTheLimit,
    "commits half a block": CommitsHalfABlock,
    "frees held blocks": FreesHeldBlocks,
    "forgives strangers": ForgivesStrangers,
    "lies about its memory": LiesAboutItsMemory,
    "reuses always": ReusesAlways,
    "evicts nothing": EvictsNothing,
}
