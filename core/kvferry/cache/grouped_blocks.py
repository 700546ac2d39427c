"""The blocks of all layer groups: given out, shared, evicted and brought back together or not at all."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry.cache.block_pool import BlockPool
from kvferry.cache.group_memory import GroupMemory
from kvferry.cache.layer_groups import GroupShape
from kvferry.cache.offload import Load, Offload
from kvferry.cache.prefix_match import PrefixMatch, longest_match
from kvferry.cache.prefix_tree import NOT_HERE, Entry, PrefixTree
from kvferry.cache.tier_blocks import StoredBlock
from kvferry.cache.tiers import Tiers
from kvferry_plugins.layout import BlockIds

Tables = list[BlockIds]
"""Block ids of one request, one array a group, from ordinal 0, −1 = not here."""

Ordinals = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reservation:
    """A new request's blocks, some of which may wait for their contents."""

    cached_tokens: int
    tables: Tables
    loads: tuple[Load, ...]


class GroupedBlocks:
    """Pools, prefix tree and tiers of a manager. Not thread-safe.

    A method that raises has changed nothing but what was evicted.

    Args:
        shapes: of the groups.
        memories: of the groups, in the same order.
        chunk_tokens: a multiple of every group's tokens per block.
        reuse: whether blocks are found by their tokens.
        tiers: what is below the device.
    """

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        memories: Sequence[GroupMemory],
        chunk_tokens: int,
        *,
        reuse: bool,
        tiers: Tiers | None,
    ) -> None:
        self.groups = tuple(shape.group for shape in shapes)
        self.offload = Offload(memories, tiers)
        self._memories = memories
        self._reuse = reuse
        self.tree = PrefixTree(chunk_tokens, [group.tokens_per_block for group in self.groups])
        self.pools = tuple(self._make_pool(index, shape) for index, shape in enumerate(shapes))

    def find(self, token_ids: Sequence[int], max_tokens: int, history_tokens: int) -> PrefixMatch:
        """Find what can be reused of a prompt, at most ``max_tokens`` tokens."""
        chunk_tokens = self.tree.chunk_tokens
        nodes = self.tree.walk(token_ids, max(0, max_tokens) // chunk_tokens) if self._reuse else []
        return longest_match(nodes, chunk_tokens, self.groups, history_tokens)

    def reserve(self, match: PrefixMatch, stops: Sequence[int], lengths: Sequence[int]) -> Reservation:
        """Give a request its first blocks: shared and fresh ones, up to ordinal ``stops`` a group.

        What is known in the tiers only has its block, but waits for its contents: ``offload.load`` it, then ``finish``
        or ``cancel``. Until then the tiers keep it.

        Args:
            match: where to begin, and what is known.
            stops: ordinals, exclusive.
            lengths: of the tables.

        Raises:
            CacheFullError: with the figures.
        """
        device = [[entry.block for entry in entries if entry.is_on_device] for entries in match.entries]
        for pool, shared, first, stop in zip(self.pools, device, match.first, stops, strict=True):
            pool.require(stop - first - len(shared), sharing=shared)
        below = list(_below(match))
        for *_, stored in below:
            self.offload.set_pinned(stored, True)  # what is evicted to make room for it must not push it out
        tables = [np.full(length, NOT_HERE, dtype=np.int32) for length in lengths]
        for pool, table, first, entries in zip(self.pools, tables, match.first, match.entries, strict=True):
            table[first : first + len(entries)] = [entry.block for entry in entries]
            pool.share(table[table != NOT_HERE])
        self.fill(tables, [np.arange(first, stop) for first, stop in zip(match.first, stops, strict=True)])
        loads = [Load(group, int(tables[group][at]), stored, entry) for group, at, entry, stored in below]
        return Reservation(match.tokens, tables, tuple(loads))

    def finish(self, reservation: Reservation) -> None:
        """Hear that all loads of a reservation came whole: from now the blocks are known."""
        for load in reservation.loads:
            entry = load.entry
            if entry is None or entry.is_on_device:  # somebody else was quicker
                self.offload.set_pinned(load.stored, False)
                continue
            self.offload.drop(load.stored)
            if entry.stored is not None:  # usually the same
                self.offload.drop(entry.stored)
            self.tree.restore(load.group, entry, load.block)
        for pool in self.pools:
            pool.reused_tokens += reservation.cached_tokens

    def cancel(self, reservation: Reservation) -> None:
        """Undo ``reserve``; what the tiers lost meanwhile is forgotten."""
        for load in reservation.loads:
            self.offload.set_pinned(load.stored, False)
            if load.stored.dropped and load.entry is not None and load.entry.stored is load.stored:
                self.tree.forget_stored(load.entry)
        self.give_back(reservation.tables)

    def fill(self, tables: Tables, ordinals: Sequence[Ordinals]) -> None:
        """Put fresh blocks where the tables have none, among ``ordinals`` of each group. Raises CacheFullError."""
        missing = [each[table[each] == NOT_HERE] for table, each in zip(tables, ordinals, strict=True)]
        for pool, each in zip(self.pools, missing, strict=True):
            pool.require(len(each))
        for group, (table, each) in enumerate(zip(tables, missing, strict=True)):
            if len(each):
                table[each] = self.pools[group].take(len(each), after=_block_before(table, int(each[0])))
                if self.groups[group].kind == "state":
                    self._memories[group].zero(table[each])

    def commit(self, token_ids: Sequence[int], tables: Tables) -> int:
        """Offer the blocks of full chunks for reuse; returns the tokens in them. Raises ValueError."""
        return self.tree.insert(token_ids, tables) * self.tree.chunk_tokens if self._reuse else 0

    def give_back(self, tables: Iterable[BlockIds], *, slid_out: bool = False) -> None:
        """Undo one ``reserve`` or ``fill`` of these blocks, one array a group; −1 is skipped."""
        for pool, table in zip(self.pools, tables, strict=True):
            pool.give_back(table[table != NOT_HERE], slid_out=slid_out)

    def close(self) -> None:
        """Let go of the memory and of what the tiers have; what is in use can still be given back. Idempotent."""
        self.offload.close()
        self._memories = ()

    def _make_pool(self, index: int, shape: GroupShape) -> BlockPool:
        is_state = shape.group.kind == "state"
        size = "" if is_state else f" of {shape.group.tokens_per_block} tokens"
        return BlockPool(
            self._memories[index].pool.num_blocks,
            f"blocks{size} of group {index} ({shape.describe()})",
            self.tree.known[index],
            partial(self._forget, index),
            setting="max_batch_size" if is_state else "kv_cache_config.max_tokens",
        )

    def _forget(self, group: int, block: int) -> tuple[int, ...]:
        entry = self.tree.known[group][block]
        stored = entry.stored if entry.is_stored else self.offload.save(group, block)
        self.tree.evict(group, block, stored)
        return (block,)


def _block_before(table: BlockIds, ordinal: int) -> int | None:
    block = int(table[ordinal - 1]) if ordinal else NOT_HERE
    return None if block == NOT_HERE else block


def _below(match: PrefixMatch) -> Iterator[tuple[int, int, Entry, StoredBlock]]:
    """Group, ordinal, entry and place of the blocks that the tiers have, and the device has not."""
    for group, (first, entries) in enumerate(zip(match.first, match.entries, strict=True)):
        for ordinal, entry in enumerate(entries, first):
            if not entry.is_on_device and entry.stored is not None:
                yield group, ordinal, entry, entry.stored
