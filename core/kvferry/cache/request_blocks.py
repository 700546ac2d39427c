"""What one request has: its tables, how far it is computed, and where its blocks are while it is suspended."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.cache.grouped_blocks import Ordinals, Tables
from kvferry.cache.prefix_tree import NOT_HERE, Entry
from kvferry.cache.tier_blocks import StoredBlock
from kvferry_plugins.layout import BlockIds, LayerGroup


@dataclass(slots=True, eq=False)
class SavedBlock:
    """One block of a suspended request."""

    group: int
    ordinal: int
    stored: StoredBlock
    entry: Entry | None = None
    """Where the same KV may still be found on the device: what was committed."""


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """A request's blocks. Not thread-safe."""

    tables: Tables
    """One a group, as long as its capacity; of a suspended request all −1."""
    computed_tokens: int
    """Leading tokens whose KV is complete, or comes from elsewhere."""
    missing_tokens: tuple[int, ...] = ()
    """Leading tokens that were not received and that no window needs, a group each; empty = none is missing."""
    saved: tuple[SavedBlock, ...] | None = None
    """What a suspended request will be made of again; None = it is not suspended."""

    def grow(self, groups: Sequence[LayerGroup], num_tokens: int) -> None:
        """Lengthen the tables to ``num_tokens`` tokens, with −1."""
        self.tables = [_lengthened(table, group.blocks_for(num_tokens)) for table, group in self._each(groups)]

    def ordinals_to_compute(self, groups: Sequence[LayerGroup], num_tokens: int) -> list[Ordinals]:
        """Ordinals that the tokens from the computed ones to ``num_tokens`` lie in, a group each."""
        return [
            np.arange(
                0 if group.kind == "state" else self.computed_tokens // group.tokens_per_block,
                group.blocks_for(num_tokens),
            )
            for group in groups
        ]

    def leave_out(self, leading_tokens: Sequence[int]) -> None:
        """Hear that leading tokens are missing, a group each."""
        known = self.missing_tokens or (0,) * len(leading_tokens)
        self.missing_tokens = tuple(map(max, known, leading_tokens))

    def whole_tables(self, groups: Sequence[LayerGroup]) -> Tables:
        """The tables without the blocks of which a part is missing."""
        if not any(self.missing_tokens):
            return self.tables
        tables = [table.copy() for table in self.tables]
        for table, group, missing in zip(tables, groups, self.missing_tokens, strict=True):
            table[: group.blocks_for(missing)] = NOT_HERE
        return tables

    def advance(self, groups: Sequence[LayerGroup], computed_tokens: int) -> Tables:
        """Hear that more tokens are computed; the blocks that no token to come reads leave the tables.

        Returns:
            Those blocks, a group each.
        """
        self.computed_tokens = max(self.computed_tokens, computed_tokens)
        left: Tables = []
        for table, group in self._each(groups):
            behind = table[: group.first_block_needed(self.computed_tokens)]
            left.append(behind[behind != NOT_HERE])
            behind[:] = NOT_HERE
        return left

    def _each(self, groups: Sequence[LayerGroup]) -> "zip[tuple[BlockIds, LayerGroup]]":
        return zip(self.tables, groups, strict=True)


def _lengthened(table: BlockIds, length: int) -> BlockIds:
    if length <= len(table):
        return table
    return np.concatenate((table, np.full(length - len(table), NOT_HERE, dtype=np.int32)))
