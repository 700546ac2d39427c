"""What planning a hand-off costs: time and memory a block, in the Python and in the native planner."""

import importlib.util
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from kvferry.transceiver.mapping import share
from kvferry.transceiver.overlap import Overlap
from kvferry.transceiver.pieces import pieces_of, slabs
from kvferry_plugins.layout import BlockCopy, BlockIds, KvLayout, LayerGroup, dense_pool

TOKENS_PER_BLOCK = 16
LAYERS, HEADS, HEAD_DIM, ITEM_BYTES = 32, 8, 128, 2
"""Of an 8-billion-parameter model: 2 MiB a block."""

ORDERS = ("in order", "shuffled")

CUT = "shuffled, half the heads"
"""To one of two ranks that have half the heads each: two runs a layer instead of one a block."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One planner, one order, one number of blocks."""

    planner: str
    """``PYTHON``: to the pieces that are posted. ``CPP``: to the segments of which the engine cuts its posts."""
    order: str
    blocks: int
    microseconds_a_block: float
    """Of the thread's CPU time, which a busy machine does not lengthen much: median, warm."""
    bytes_a_block: float
    """Most that planning had allocated at a time."""
    segments: int

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def measure(blocks: int, rounds: int, seed: int) -> list[Planned]:
    """Plan so many blocks in both orders, with each planner that is installed."""
    has_engine = importlib.util.find_spec("kvferry_native") is not None
    found = []
    for order in (*ORDERS, CUT):
        overlap, ids = _overlap(blocks, HEADS // 2 if order == CUT else HEADS), _tables(order, blocks, seed)
        found.append(_python(order, overlap, ids, rounds))
        if has_engine:
            found.append(_native(order, overlap, ids, rounds))
    return found


def _overlap(blocks: int, heads: int) -> Overlap:
    """A worker that has everything, and a rank that has the first heads."""
    return share([_layout(blocks, HEADS)], [_layout(blocks, heads)])[0, 0]


def _layout(blocks: int, heads: int) -> KvLayout:
    layers = tuple(range(LAYERS))
    pool = dense_pool(
        layers=layers,
        kv_heads=heads,
        head_dim=HEAD_DIM,
        tokens_per_block=TOKENS_PER_BLOCK,
        item_bytes=ITEM_BYTES,
        num_blocks=blocks,
    )
    group = LayerGroup(layers, (0,), TOKENS_PER_BLOCK, heads, HEAD_DIM, total_heads=HEADS)
    return KvLayout("bfloat16", (group,), (pool,))


def _tables(order: str, blocks: int, seed: int) -> tuple[BlockIds, BlockIds]:
    if order == "in order":
        table = np.arange(blocks, dtype=np.int32)
        return table, table
    random = np.random.default_rng(seed)
    src, dst = (random.permutation(blocks).astype(np.int32) for _ in range(2))
    return src, dst


def _copy(overlap: Overlap, ids: tuple[BlockIds, BlockIds]) -> BlockCopy:
    tokens = len(ids[0]) * TOKENS_PER_BLOCK
    (copy,) = overlap.copies([ids[0]], [ids[1]], tokens, 0, 0, tokens)
    return copy


def _python(order: str, overlap: Overlap, ids: tuple[BlockIds, BlockIds], rounds: int) -> Planned:
    def plan() -> int:
        return sum(len(piece.src) for piece in pieces_of([_copy(overlap, ids)]))

    plan()
    tracemalloc.start()
    plan()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return _planned("PYTHON", order, len(ids[0]), plan, rounds, peak)


def _native(order: str, overlap: Overlap, ids: tuple[BlockIds, BlockIds], rounds: int) -> Planned:
    from kvferry_native import BlockMap

    pools = _copy(overlap, ids).pools
    ends = (0, pools.src.block_stride, pools.src.num_blocks, 0, pools.dst.block_stride, pools.dst.num_blocks)
    block_map = BlockMap([(*ends, [tuple(run) for run in pools.runs.tolist()])])

    def plan() -> int:
        copies = (copy for some in slabs([_copy(overlap, ids)]) for copy in some)
        return sum(len(block_map.plan(copy.src, copy.dst)) for copy in copies)

    peak = _resident_peak(plan)
    return _planned("CPP", order, len(ids[0]), plan, rounds, peak)


def _planned(planner: str, order: str, blocks: int, plan: Callable[[], int], rounds: int, peak: int) -> Planned:
    segments, seconds = plan(), []
    for _ in range(rounds):
        begun = time.thread_time()
        plan()
        seconds.append(time.thread_time() - begun)
    return Planned(planner, order, blocks, median(seconds) / blocks * 1e6, peak / blocks, segments)


def _resident_peak(plan: Callable[[], object]) -> int:
    """Bytes by which the process grew, at most, while it planned for the first time; Linux alone tells."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _resident("VmRSS")
    plan()
    return max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise LookupError(name)
