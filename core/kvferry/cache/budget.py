"""How many blocks each layer group gets of one budget in bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cache.layer_groups import GroupShape
from kvferry.cache.memory import memory_budget
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.layout import LayerGroup
from kvferry_plugins.types import ManagerSpec

DEFAULT_SEQUENCE = 4096
"""Tokens of the request that pools are shared out for where ``max_seq_len`` is not set."""

PREFILL_STEP = 512
"""Tokens beside its window that a prefilling request needs of a window's group at a time."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Blocks of each group, and why so many."""

    num_blocks: tuple[int, ...]
    block_bytes: tuple[int, ...]
    budget: int
    """Bytes."""
    reason: str
    sequence: int
    """Tokens of the request that the shares are measured by."""

    @property
    def nbytes(self) -> int:
        """What the groups take of the budget."""
        return sum(blocks * nbytes for blocks, nbytes in zip(self.num_blocks, self.block_bytes, strict=True))

    def __str__(self) -> str:
        pools = ", ".join(
            f"{n} blocks of {size} bytes" for n, size in zip(self.num_blocks, self.block_bytes, strict=True)
        )
        return (
            f"{pools}: {self.nbytes / 2**20:.1f} of {self.budget / 2**20:.1f} MiB ({self.reason}), shared out by what "
            f"a request of {self.sequence} tokens needs of each group"
        )


def share_out(spec: ManagerSpec, shapes: Sequence[GroupShape]) -> Shares:
    """Share one budget out: a block of each state for every request of a batch, the rest by need.

    ``max_tokens`` stands for the bytes that V1 would take for so many tokens, with the states on top; without it the
    budget is the fraction of free memory.

    Raises:
        ConfigError: it cannot hold one block a group.
    """
    states = spec.max_batch_size * sum(shape.block_stride for shape in shapes if shape.group.kind == "state")
    budget, reason = _budget(spec, shapes, states)
    _require_one_block_each(spec, shapes, budget - states, reason)
    paged = [shape for shape in shapes if shape.group.kind != "state"]
    sequence = _sequence(spec, paged, budget - states)
    one_request = max(1, _bytes_needed(paged, sequence))
    return Shares(
        num_blocks=tuple(
            spec.max_batch_size
            if shape.group.kind == "state"
            else max(1, blocks_needed(shape.group, sequence) * (budget - states) // one_request)
            for shape in shapes
        ),
        block_bytes=tuple(shape.block_stride for shape in shapes),
        budget=budget,
        reason=reason,
        sequence=sequence,
    )


def blocks_needed(group: LayerGroup, num_tokens: int) -> int:
    """Blocks that a request of so many tokens has at most at a time, while it is prefilled step by step."""
    if group.window is None:
        return group.blocks_for(num_tokens)
    # A window and a step may begin in the middle of a block.
    return min(group.blocks_for(num_tokens), group.blocks_for(group.window + PREFILL_STEP) + 1)


def _budget(spec: ManagerSpec, shapes: Sequence[GroupShape], states: int) -> tuple[int, str]:
    if spec.max_tokens is None:
        return memory_budget(spec)
    blocks = -(-spec.max_tokens // spec.tokens_per_block)
    nbytes = blocks * sum(_bytes_of(shape, spec.tokens_per_block) for shape in shapes)
    on_top = f" and states for max_batch_size={spec.max_batch_size}" if states else ""
    return nbytes + states, f"max_tokens={spec.max_tokens}{on_top}"


def _bytes_of(shape: GroupShape, num_tokens: int) -> int:
    """Bytes of so many tokens if none of them is left out."""
    return 0 if shape.group.kind == "state" else shape.group.blocks_for(num_tokens) * shape.block_stride


def _require_one_block_each(spec: ManagerSpec, shapes: Sequence[GroupShape], rest: int, reason: str) -> None:
    needed = sum(_bytes_of(shape, spec.tokens_per_block) for shape in shapes)
    if rest < needed:
        each = "; ".join(f"{shape.describe()}: {shape.block_stride} bytes a block" for shape in shapes)
        raise ConfigError(
            f"the KV pools would get no block a group ({reason}, which leaves {rest} bytes, but {needed} are needed "
            f"for {spec.tokens_per_block} tokens; {each}); set kv_cache_config.max_tokens, or raise "
            "free_gpu_memory_fraction",
            setting="kv_cache_config.max_tokens",
        )


def _sequence(spec: ManagerSpec, paged: Sequence[GroupShape], budget: int) -> int:
    """Choose the longest request that is wanted, possible and fits."""
    wanted = spec.max_seq_len or DEFAULT_SEQUENCE
    longest = wanted if spec.max_tokens is None else min(wanted, spec.max_tokens)
    fits, too_long = 1, longest + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if _bytes_needed(paged, middle) <= budget else (fits, middle)
    return fits


def _bytes_needed(paged: Sequence[GroupShape], num_tokens: int) -> int:
    return sum(blocks_needed(shape.group, num_tokens) * shape.block_stride for shape in paged)
