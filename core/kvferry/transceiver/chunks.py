"""What each chunk of a prefill adds: the blocks that it completed, and that may still be wanted."""

from dataclasses import dataclass

import numpy as np

from kvferry.transceiver.sends import Send
from kvferry_plugins.layout import BlockIds, KvLayout, LayerGroup


@dataclass(frozen=True, slots=True)
class Chunk:
    """The blocks of some consecutive ordinals, one array a group; −1 = not here."""

    computed_tokens: int
    """Of the prompt, in all."""
    first: tuple[int, ...]
    """Each group's first ordinal."""
    tables: tuple[BlockIds, ...]

    def put(self, tables: tuple[BlockIds, ...]) -> None:
        """Enter the blocks in tables that begin with ordinal 0."""
        for first, ours, whole in zip(self.first, self.tables, tables, strict=True):
            whole[first : first + len(ours)] = ours


def no_blocks(layout: KvLayout, prompt_tokens: int) -> tuple[BlockIds, ...]:
    """A prompt's tables before anything is computed: −1 for each ordinal."""
    return tuple(np.full(group.blocks_for(prompt_tokens), -1, dtype=np.int32) for group in layout.groups)


def newly_complete(layout: KvLayout, present: tuple[BlockIds, ...], send: Send, computed_tokens: int) -> Chunk:
    """Find what is complete with so many tokens and was not before; what slid out of a window is nobody's any more.

    Args:
        layout: of the manager.
        present: its table of the request, from ordinal 0 on, as it is now.
        send: the request, with what is held already.
        computed_tokens: of the prompt.

    Raises:
        ValueError: the table is shorter than what is said to be computed.
    """
    prompt_tokens = send.prompt_tokens
    first, tables = [], []
    for group, table in zip(layout.groups, present, strict=True):
        stop = complete_blocks(group, computed_tokens, prompt_tokens)
        if len(table) < stop:
            raise ValueError(f"request {send.request_id} has {len(table)} blocks, its first tokens need {stop}")
        known = complete_blocks(group, send.offered_tokens, prompt_tokens)
        start = min(stop, max(known, group.first_block_needed(prompt_tokens)))
        first.append(start)
        tables.append(np.ascontiguousarray(table[start:stop]))
    return Chunk(computed_tokens, tuple(first), tuple(tables))


def complete_blocks(group: LayerGroup, computed_tokens: int, prompt_tokens: int) -> int:
    """Ordinals that are complete: the prompt's last one counts although it is not full; a state is, with the end."""
    if computed_tokens >= prompt_tokens:
        return group.blocks_for(prompt_tokens)
    return 0 if group.kind == "state" else computed_tokens // group.tokens_per_block
