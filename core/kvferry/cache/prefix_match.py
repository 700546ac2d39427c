"""How much of a prompt's prefix can be reused, when each group needs only what its window sees."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cache.prefix_tree import Entry, Node
from kvferry_plugins.layout import LayerGroup


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest usable prefix, and where its KV is."""

    tokens: int
    first: tuple[int, ...]
    """Per group, the ordinal of the first block that what follows reads."""
    entries: tuple[tuple[Entry, ...], ...]
    """Per group, of the ordinals from ``first`` to the prefix's end."""


def longest_match(
    nodes: Sequence[Node], chunk_tokens: int, groups: Sequence[LayerGroup], history_tokens: int
) -> PrefixMatch:
    """Find the longest prefix of which every group has the blocks that it still needs.

    Args:
        nodes: the known chunks of the prompt, in token order.
        chunk_tokens: of each.
        groups: the layer groups.
        history_tokens: leading tokens that nobody will compute here: a window needs only what comes behind them reads.
    """
    entries = [[entry for node in nodes for entry in node.entries[group]] for group in range(len(groups))]
    gaps = [_last_gaps(each) for each in entries]

    def is_usable(tokens: int) -> bool:
        return all(
            gap[group.blocks_for(tokens)] < group.first_block_needed(max(tokens, history_tokens))
            for group, gap in zip(groups, gaps, strict=True)
        )

    lengths = range(len(nodes) * chunk_tokens, 0, -chunk_tokens)
    tokens = next((length for length in lengths if is_usable(length)), 0)
    first = tuple(group.first_block_needed(max(tokens, history_tokens)) for group in groups)
    return PrefixMatch(
        tokens,
        first,
        tuple(
            tuple(each[start : group.blocks_for(tokens)])
            for each, start, group in zip(entries, first, groups, strict=True)
        ),
    )


def _last_gaps(entries: Sequence[Entry]) -> list[int]:
    """For each length, the last ordinal below it whose block is nowhere, or −1."""
    gaps = [-1]
    for ordinal, entry in enumerate(entries):
        gaps.append(gaps[-1] if entry.is_known else ordinal)
    return gaps
