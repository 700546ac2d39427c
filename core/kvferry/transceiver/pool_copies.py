"""From pairs of head ranges to the runs of bytes that a pair of blocks exchanges."""

from dataclasses import dataclass, field

import numpy as np

from kvferry.transceiver.coalesce import merge
from kvferry_plugins.layout import Addresses, Pool, PoolCopy, RoleView


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Consecutive heads of one (layer, role), in a block of each side."""

    src: RoleView
    src_head: int
    """First head, as the view counts them."""
    dst: RoleView
    dst_head: int
    heads: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.src.row_bytes


@dataclass(slots=True)
class PoolPair:
    """All head ranges that go from one pool to another, and the copies prepared so far, by token range."""

    src: Pool
    dst: Pool
    ranges: tuple[HeadRange, ...]
    _copies: dict[tuple[int, int, int], PoolCopy] = field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return sum(heads.token_bytes for heads in self.ranges)

    def copy(self, src_token: int, dst_token: int, tokens: int) -> PoolCopy:
        """The copy of some rows of each block, from a row here to a row there; the same object each time."""
        rows = (src_token, dst_token, tokens)
        if rows not in self._copies:
            self._copies[rows] = PoolCopy(self.src, self.dst, _runs(self.ranges, src_token, dst_token, tokens))
        return self._copies[rows]


def _runs(ranges: tuple[HeadRange, ...], src_token: int, dst_token: int, tokens: int) -> Addresses:
    """int64[n, 3], ascending by source; what touches at both ends is one run."""
    src, dst, nbytes = _rows(ranges, src_token, dst_token, tokens)
    order = np.argsort(src)
    return np.stack(merge(src[order], dst[order], nbytes[order]), axis=1)


def _rows(
    ranges: tuple[HeadRange, ...], src_token: int, dst_token: int, tokens: int
) -> tuple[Addresses, Addresses, Addresses]:
    """One row a head, or a head and token where tokens do not lie side by side."""
    row_bytes = np.array([heads.src.row_bytes for heads in ranges], dtype=np.int64)
    counts = np.array([heads.heads for heads in ranges], dtype=np.int64)
    src = _ends([heads.src for heads in ranges], [heads.src_head for heads in ranges], counts, src_token)
    dst = _ends([heads.dst for heads in ranges], [heads.dst_head for heads in ranges], counts, dst_token)
    row_bytes = np.repeat(row_bytes, counts)
    if bool((src.token_stride == row_bytes).all() and (dst.token_stride == row_bytes).all()):
        return src.start, dst.start, tokens * row_bytes
    token = np.arange(tokens, dtype=np.int64)
    each = (side.start[:, None] + side.token_stride[:, None] * token for side in (src, dst))
    src_rows, dst_rows = (starts.reshape(-1) for starts in each)
    return src_rows, dst_rows, np.repeat(row_bytes, tokens)


@dataclass(frozen=True, slots=True)
class _Ends:
    """Of each head: where its first row starts in the block, and how far its next token is."""

    start: Addresses
    token_stride: Addresses


def _ends(views: list[RoleView], first_heads: list[int], counts: Addresses, token: int) -> _Ends:
    head_stride = np.repeat(np.array([view.head_stride for view in views], dtype=np.int64), counts)
    token_stride = np.array([view.token_stride for view in views], dtype=np.int64)
    offset = np.array([view.offset for view in views], dtype=np.int64) + token * token_stride
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    head = np.repeat(np.array(first_heads, dtype=np.int64), counts) + within
    return _Ends(np.repeat(offset, counts) + head * head_stride, np.repeat(token_stride, counts))
