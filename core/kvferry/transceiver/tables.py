"""The checks that a TABLE must pass before anything is written to the blocks it names."""

import numpy as np

from kvferry.transceiver.coalesce import has_doubles
from kvferry.transceiver.overlap import MissingBlocksError, Overlap, wanted_ordinals
from kvferry.transceiver.sends import Send
from kvferry.transceiver.wire import Table
from kvferry_plugins.layout import BlockIds, KvLayout, LayerGroup


class TableError(ValueError):
    """A TABLE that cannot be served; ``field`` is what is to blame."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def read_tables(table: Table, send: Send, overlap: Overlap, target: KvLayout) -> tuple[BlockIds, ...]:
    """Check a TABLE against the request and the target's layout, and unpack its block ids.

    Args:
        table: as it came.
        send: the request that it is about.
        overlap: what we give to the target.
        target: the target's layout.

    Raises:
        TableError: another prompt, a start that is no block boundary, block ids that are missing, out of the pool's
            bounds or doubled, another byte count than ours, or blocks that are not here any more.
    """
    if (table.prompt_digest, table.prompt_tokens) != (send.prompt_digest, send.prompt_tokens):
        raise TableError("prompt", f"request {send.request_id} prefilled another prompt")
    if table.start_tokens > table.prompt_tokens:
        raise TableError("start_tokens", f"{table.start_tokens} is behind the prompt's {table.prompt_tokens} tokens")
    if len(table.blocks) != len(target.groups):
        raise TableError("blocks", f"{len(table.blocks)} tables for {len(target.groups)} layer groups")
    tables = tuple(_read_ids(table, index, target) for index in range(len(target.groups)))
    expected, _ = overlap.expected(tables, table.prompt_tokens, table.start_tokens)
    if table.nbytes != expected:
        raise TableError("nbytes", f"the blocks hold {expected} bytes, {table.nbytes} are expected")
    if send.computed_tokens >= send.prompt_tokens:
        _require_all(send, overlap, tables, table.start_tokens)
    return tables


def _read_ids(table: Table, index: int, target: KvLayout) -> BlockIds:
    group = target.groups[index]
    _require_boundary(table.start_tokens, group)
    named = len(wanted_ordinals(group, table.prompt_tokens, table.start_tokens))
    raw = table.blocks[index]
    if len(raw) != 4 * named:
        raise TableError("blocks", f"group {index} names {len(raw) / 4:g} blocks, the prompt needs {named}")
    ids = np.frombuffer(raw, dtype="<i4").astype(np.int32)
    if named and (ids.min() < -1 or ids.max() >= target.num_blocks(index)):
        raise TableError("blocks", f"group {index} names blocks outside 0 … {target.num_blocks(index) - 1}")
    if has_doubles(ids[ids != -1]):
        raise TableError("blocks", f"group {index} names a block twice")
    return ids


def _require_boundary(start_tokens: int, group: LayerGroup) -> None:
    if group.kind != "state" and start_tokens % group.tokens_per_block:
        raise TableError("start_tokens", f"{start_tokens} is no multiple of {group.tokens_per_block}")


def _require_all(send: Send, overlap: Overlap, tables: tuple[BlockIds, ...], start_tokens: int) -> None:
    """Refuse before POSTING what would fail after it."""
    if all((table != -1).all() for table in send.tables):
        return
    try:
        overlap.copies(send.tables, tables, send.prompt_tokens, start_tokens, start_tokens, send.prompt_tokens)
    except MissingBlocksError as error:
        raise TableError("blocks", str(error)) from error
