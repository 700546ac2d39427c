"""A hand-off's segments, cut into pieces that are posted a few at a time.

Posting piecewise keeps a cancellation prompt (at most a window of bytes is in flight) and lets the ledger say how
far a hand-off has come. Segments are planned some ten thousand at a time, as pieces are asked for: what waits takes
8 bytes a block, however many runs a block has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvferry.transceiver.coalesce import ascending, plan_segments
from kvferry_plugins.layout import Addresses, BlockCopy

PIECE_BYTES = 32 << 20
"""Bytes of one piece."""

PIECES_IN_FLIGHT = 8
"""Pieces that are posted at once."""


RUNS_AT_ONCE = 1 << 16
"""Runs of bytes that are planned at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Segments that are submitted together."""

    src: Addresses
    dst: Addresses
    nbytes: Addresses

    @property
    def total(self) -> int:
        """Bytes of all segments."""
        return int(self.nbytes.sum())


def pieces_of(copies: Sequence[BlockCopy]) -> Iterator[Piece]:
    """Plan and cut, little by little. Raises ValueError as ``plan_segments``, when it comes to it."""
    for some in slabs(copies):
        planned = [plan_segments(copy.pools, copy.src, copy.dst) for copy in some]
        if len(planned) == 1:
            yield from cut(*planned[0])
        else:
            src, dst, nbytes = (np.concatenate(column) for column in zip(*planned, strict=True))
            yield from cut(src, dst, nbytes)


def slabs(copies: Sequence[BlockCopy], runs: int = RUNS_AT_ONCE) -> Iterator[list[BlockCopy]]:
    """Yield copies of at most so many runs together, or of one block, each copy in the order of its source blocks."""
    slab: list[BlockCopy] = []
    room = runs
    for copy in copies:
        each, (src, dst) = len(copy.pools.runs), ascending(copy.src, copy.dst)
        start = 0
        while start < len(src):
            take = min(room // each, len(src) - start) or (0 if slab else 1)
            if take:
                slab.append(BlockCopy(copy.pools, src[start : start + take], dst[start : start + take]))
                start, room = start + take, max(0, room - take * each)
            if start < len(src):
                yield slab
                slab, room = [], runs
    if slab:
        yield slab


def cut(src: Addresses, dst: Addresses, nbytes: Addresses, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Yield pieces of at most ``piece_bytes`` that cover the segments in order; a longer segment is split."""
    if len(nbytes) == 1 and int(nbytes[0]) <= piece_bytes:
        yield Piece(src, dst, nbytes)
        return
    src, dst, nbytes = _split_long(src, dst, nbytes, piece_bytes)
    for start, stop in pairwise(_ends(nbytes, piece_bytes)):
        yield Piece(src[start:stop], dst[start:stop], nbytes[start:stop])


def _ends(nbytes: Addresses, piece_bytes: int) -> Iterator[int]:
    """0, and where each piece ends; segments of one length, which are usual, need no search."""
    yield 0
    count = len(nbytes)
    if count and bool((nbytes[:-1] == nbytes[0]).all()) and nbytes[-1] <= nbytes[0]:
        each = max(1, piece_bytes // int(nbytes[0]))
        yield from range(each, count, each)
        yield count
        return
    ends = np.cumsum(nbytes)
    stop = done = 0
    while stop < count:
        stop = max(int(ends.searchsorted(done + piece_bytes, side="right")), stop + 1)
        done = int(ends[stop - 1])
        yield stop


def _split_long(
    src: Addresses, dst: Addresses, nbytes: Addresses, longest: int
) -> tuple[Addresses, Addresses, Addresses]:
    """Split segments longer than ``longest``."""
    parts = -(-nbytes // longest)
    if not len(parts) or int(parts.max()) <= 1:
        return src, dst, nbytes
    owner = np.repeat(np.arange(len(parts)), parts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    offset = within * longest
    return src[owner] + offset, dst[owner] + offset, np.minimum(longest, nbytes[owner] - offset)
