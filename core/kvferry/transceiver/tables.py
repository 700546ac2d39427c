"""The checks that a TABLE must pass before anything is written to the blocks it names."""

import numpy as np

from kvferry.transceiver.coalesce import has_doubles
from kvferry.transceiver.sends import Send
from kvferry.transceiver.wire import Table
from kvferry_plugins.layout import BlockIds, KvLayout


class TableError(ValueError):
    """A TABLE that cannot be served; ``field`` is what is to blame."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def read_tables(table: Table, send: Send, layout: KvLayout, target: KvLayout) -> tuple[BlockIds, ...]:
    """Check a TABLE against the request and the target's layout, and unpack its block ids.

    Raises:
        TableError: another prompt, a start that is no block boundary, block ids that are missing, out of the pool's
            bounds or doubled, or another byte count than ours.
    """
    if (table.prompt_digest, table.prompt_tokens) != (send.prompt_digest, send.prompt_tokens):
        raise TableError("prompt", f"request {send.request_id} prefilled another prompt")
    if len(table.blocks) != len(layout.groups):
        raise TableError("blocks", f"{len(table.blocks)} tables for {len(layout.groups)} layer groups")
    tables = tuple(_read_ids(table, index, layout, target) for index in range(len(layout.groups)))
    expected = expected_bytes(layout, tables)
    if table.nbytes != expected:
        raise TableError("nbytes", f"the blocks hold {expected} bytes, {table.nbytes} are expected")
    return tables


def expected_bytes(layout: KvLayout, tables: tuple[BlockIds, ...]) -> int:
    """Bytes of the blocks in the tables: what both sides compute and must agree on."""
    return sum(len(table) * layout.block_bytes(group) for group, table in enumerate(tables))


def _read_ids(table: Table, group: int, layout: KvLayout, target: KvLayout) -> BlockIds:
    tokens_per_block = layout.groups[group].tokens_per_block
    start, remainder = divmod(table.start_tokens, tokens_per_block)
    if remainder:
        raise TableError("start_tokens", f"{table.start_tokens} is no multiple of {tokens_per_block}")
    if table.start_tokens > table.prompt_tokens:
        raise TableError("start_tokens", f"{table.start_tokens} is behind the prompt's {table.prompt_tokens} tokens")
    wanted = max(0, -(-table.prompt_tokens // tokens_per_block) - start)
    raw = table.blocks[group]
    if len(raw) != 4 * wanted:
        raise TableError("blocks", f"group {group} names {len(raw) / 4:g} blocks, the prompt needs {wanted}")
    ids = np.frombuffer(raw, dtype="<i4").astype(np.int32)
    if wanted and (ids.min() < 0 or ids.max() >= target.num_blocks(group)):
        raise TableError("blocks", f"group {group} names blocks outside 0 … {target.num_blocks(group) - 1}")
    if has_doubles(ids):
        raise TableError("blocks", f"group {group} names a block twice")
    return ids
