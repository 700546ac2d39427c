"""``Overlap``: what one source rank gives to one destination rank, and the copies of a request that this makes.

Pure: no memory is touched. A request's tokens are cut into units, as long as the shorter block of the two sides, so
that a unit lies in one block at either end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvferry.transceiver.pool_copies import PoolPair
from kvferry_plugins.layout import BlockCopy, BlockIds, LayerGroup


class MissingBlocksError(ValueError):
    """The destination wants what the source has not: it slid out of a window, or was never computed."""


@dataclass(frozen=True, slots=True)
class Span:
    """Which tokens of a request: all that travel, and those of the chunk at hand."""

    prompt_tokens: int
    start_tokens: int
    """What the destination has already."""
    from_tokens: int
    """Up to here, everything was sent before."""
    to_tokens: int
    """Computed by now."""


def wanted_ordinals(group: LayerGroup, prompt_tokens: int, start_tokens: int) -> range:
    """The block ordinals of a destination group that a TABLE names, wanted (an id) or not (−1).

    A state is one block, whatever its length, and is wanted unless nothing is.
    """
    if group.kind == "state":
        return range(min(1, max(0, prompt_tokens - start_tokens)))
    return range(start_tokens // group.tokens_per_block, group.blocks_for(prompt_tokens))


@dataclass(frozen=True, eq=False)
class GroupPair:
    """What one layer group of a source gives to one of a destination."""

    src_index: int
    src: LayerGroup
    dst_index: int
    dst: LayerGroup
    pools: tuple[PoolPair, ...]

    @cached_property
    def unit(self) -> int:
        """Tokens of one unit."""
        return min(self.src.tokens_per_block, self.dst.tokens_per_block)

    @cached_property
    def phases(self) -> int:
        """In how many ways units lie in their blocks."""
        return max(self.src.tokens_per_block, self.dst.tokens_per_block) // self.unit

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token, or of the whole state."""
        return sum(pool.token_bytes for pool in self.pools)

    def left_out(self, prompt_tokens: int) -> int:
        """Leading tokens that the source need not have any more, although they may share a block with those it has.

        Only where blocks slide out of the source's window that are smaller than the destination's.
        """
        if self.src.window is None or self.dst.window is None or self.unit == self.dst.tokens_per_block:
            return 0
        return max(0, prompt_tokens + 1 - self.dst.window) // self.unit * self.unit

    def wanted_tokens(self, table: BlockIds, prompt_tokens: int) -> int:
        """Tokens of the prompt that go to the wanted blocks; 1 for a state."""
        if not len(table):
            return 0
        blocks = int(np.count_nonzero(table != -1))
        if self.dst.kind == "state":
            return blocks
        padding = -prompt_tokens % self.dst.tokens_per_block if table[-1] != -1 else 0
        return blocks * self.dst.tokens_per_block - padding - self._left_out_of(table, prompt_tokens)

    def _left_out_of(self, table: BlockIds, prompt_tokens: int) -> int:
        """How many of the left-out tokens would be in wanted blocks."""
        whole, rest = divmod(self.left_out(prompt_tokens), self.dst.tokens_per_block)
        ordinal = whole - (self.dst.blocks_for(prompt_tokens) - len(table))
        if ordinal < 0:
            return 0
        before = int(np.count_nonzero(table[:ordinal] != -1)) * self.dst.tokens_per_block
        return before + (rest if table[ordinal] != -1 else 0)

    def copies(self, src_table: BlockIds, dst_table: BlockIds, span: Span) -> Iterator[BlockCopy]:
        """The chunk's copies; ``dst_table`` begins with the first wanted ordinal."""
        if self.dst.kind == "state":
            if span.from_tokens < span.prompt_tokens <= span.to_tokens:
                yield from self._copy(src_table, dst_table, (0, 0, 1))
            return
        first, stop = self._first_unit(span, span.from_tokens), self._first_unit(span, span.to_tokens)
        last_tokens = span.prompt_tokens - (stop - 1) * self.unit
        if stop > first and last_tokens < self.unit:
            stop -= 1
            yield from self._units(src_table, dst_table, span, range(stop, stop + 1), last_tokens)
        for start in range(first, min(first + self.phases, stop)):
            yield from self._units(src_table, dst_table, span, range(start, stop, self.phases), self.unit)

    def _first_unit(self, span: Span, tokens: int) -> int:
        """The first unit that so many tokens do not complete: a source's block is sent once it is complete."""
        if tokens >= span.prompt_tokens:
            return -(-span.prompt_tokens // self.unit)
        complete = tokens // self.src.tokens_per_block * self.src.tokens_per_block
        return max(complete, span.start_tokens, self.left_out(span.prompt_tokens)) // self.unit

    def _units(
        self, src_table: BlockIds, dst_table: BlockIds, span: Span, units: range, tokens: int
    ) -> Iterator[BlockCopy]:
        """Copies of units that lie alike in their blocks, the first ``tokens`` tokens of each."""
        src_token, src_slice = _place(units, self.unit, self.src.tokens_per_block, 0)
        first = span.start_tokens // self.dst.tokens_per_block
        dst_token, dst_slice = _place(units, self.unit, self.dst.tokens_per_block, first)
        if src_slice.stop > len(src_table):
            raise MissingBlocksError(f"{self._name} has {len(src_table)} blocks here, {src_slice.stop} are needed")
        yield from self._copy(src_table[src_slice], dst_table[dst_slice], (src_token, dst_token, tokens))

    def _copy(self, src: BlockIds, dst: BlockIds, rows: tuple[int, int, int]) -> Iterator[BlockCopy]:
        wanted = dst != -1
        if not wanted.all():
            src, dst = src[wanted], dst[wanted]
        if (src == -1).any():
            missing = int(np.count_nonzero(src == -1))
            raise MissingBlocksError(f"{self._name} lacks {missing} of {len(src)} blocks that the destination wants")
        if len(dst):
            for pool in self.pools:
                yield BlockCopy(pool.copy(*rows), src, dst)

    @property
    def _name(self) -> str:
        window = f", window {self.dst.window}" if self.dst.window is not None else ""
        return f"group {self.src_index} (layers {_listed(self.src.layers)}{window})"


def _place(units: range, unit: int, tokens_per_block: int, first_ordinal: int) -> tuple[int, slice]:
    """Where units lie: the first token in each block, and the blocks in a table that begins with an ordinal."""
    a_block = tokens_per_block // unit
    ordinal, within = divmod(units.start, a_block)
    step = max(1, units.step // a_block)
    start = ordinal - first_ordinal
    return within * unit, slice(start, start + (len(units) - 1) * step + 1, step)


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) if len(layers) <= 4 else f"{layers[0]} … {layers[-1]}"


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """What one source rank gives to one destination rank; made once a pair."""

    groups: tuple[GroupPair, ...]
    destination_groups: tuple[LayerGroup, ...]
    _fed: frozenset[int] = field(init=False)
    """Destination groups that get anything from this source."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_fed", frozenset(group.dst_index for group in self.groups))

    def wanted_ordinals(self, prompt_tokens: int, start_tokens: int) -> tuple[range, ...]:
        """For each destination group the block ordinals that its TABLE names."""
        return tuple(wanted_ordinals(group, prompt_tokens, start_tokens) for group in self.destination_groups)

    def expected(self, dst_tables: Sequence[BlockIds], prompt_tokens: int, start_tokens: int) -> tuple[int, int]:
        """Bytes that must come from this source, and the destination blocks that they fill or help to fill.

        Args:
            dst_tables: one array a destination group, for exactly the wanted ordinals; −1 = not wanted.
            prompt_tokens: of the request.
            start_tokens: that the destination has already.
        """
        if start_tokens >= prompt_tokens:
            return 0, 0
        nbytes = sum(
            group.wanted_tokens(dst_tables[group.dst_index], prompt_tokens) * group.token_bytes for group in self.groups
        )
        return nbytes, sum(int(np.count_nonzero(dst_tables[index] != -1)) for index in self._fed)

    def left_out(self, prompt_tokens: int, start_tokens: int) -> tuple[int, ...]:
        """For each destination group, how many leading tokens will be missing; 0 where all is there."""
        left_out = [0] * len(self.destination_groups)
        for group in self.groups:
            tokens = group.left_out(prompt_tokens)
            if tokens > start_tokens:
                left_out[group.dst_index] = max(left_out[group.dst_index], tokens)
        return tuple(left_out)

    def copies(
        self,
        src_tables: Sequence[BlockIds],
        dst_tables: Sequence[BlockIds],
        prompt_tokens: int,
        start_tokens: int,
        from_tokens: int,
        to_tokens: int,
    ) -> list[BlockCopy]:
        """The copies of what is complete with ``to_tokens`` tokens and was not with ``from_tokens``.

        Chunks that follow one another, from ``start_tokens`` to ``prompt_tokens``, write every wanted byte once.

        Args:
            src_tables: one array a source group, from ordinal 0 on; −1 = not here.
            dst_tables: as for ``expected``.
            prompt_tokens: of the request.
            start_tokens: that the destination has already; a multiple of its block sizes.
            from_tokens: that earlier chunks ended with; ``start_tokens`` for the first.
            to_tokens: that are computed now.

        Raises:
            MissingBlocksError: the destination wants a block that the source has not.
        """
        span = Span(prompt_tokens, start_tokens, from_tokens, to_tokens)
        if start_tokens >= prompt_tokens:
            return []
        return [
            copy
            for group in self.groups
            for copy in group.copies(src_tables[group.src_index], dst_tables[group.dst_index], span)
        ]

    def arrivals(self, dst_tables: Sequence[BlockIds], prompt_tokens: int, start_tokens: int) -> list[BlockCopy]:
        """All copies of a request as its destination knows them; the source's ids mean nothing."""
        somewhere = [np.zeros(group.src.blocks_for(prompt_tokens), dtype=np.int32) for group in self.groups]
        span = Span(prompt_tokens, start_tokens, start_tokens, prompt_tokens)
        if start_tokens >= prompt_tokens:
            return []
        pairs = zip(self.groups, somewhere, strict=True)
        return [copy for group, src in pairs for copy in group.copies(src, dst_tables[group.dst_index], span)]
