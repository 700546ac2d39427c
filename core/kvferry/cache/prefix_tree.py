"""Which blocks hold the KV of which prompt prefix, over all layer groups, on the device and in the tiers below."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.cache.tier_blocks import StoredBlock
from kvferry_plugins.layout import BlockIds

NOT_HERE = -1


@dataclass(slots=True, eq=False)
class Entry:
    """Where the KV of one block's tokens is, in one group."""

    node: "Node"
    block: int = NOT_HERE
    """On the device."""
    stored: StoredBlock | None = None
    """In a tier below."""
    is_watched: bool = False
    """Whether the tree looks now and then whether the tiers dropped it."""

    @property
    def is_on_device(self) -> bool:
        """Whether a block of the device holds it."""
        return self.block != NOT_HERE

    @property
    def is_stored(self) -> bool:
        """Whether a tier below holds it."""
        return self.stored is not None and not self.stored.dropped

    @property
    def is_known(self) -> bool:
        """Whether it is anywhere."""
        return self.is_on_device or self.is_stored


@dataclass(slots=True, eq=False)
class Node:
    """One chunk of tokens behind those of its parents."""

    tokens: bytes
    parent: "Node | None"
    entries: tuple[list[Entry], ...] = ()
    """Per group, one a block of the chunk, in token order."""
    children: "dict[bytes, Node]" = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is reached through it."""
        return not self.children and not any(entry.is_known for group in self.entries for entry in group)


class PrefixTree:
    """Blocks by the tokens whose KV they hold. Not thread-safe; pure bookkeeping.

    All groups meet at chunks, which each of them cuts into blocks of its own. A chunk is found by its very tokens
    behind the very chunks before it, so that no hash can lead to another prompt's KV.

    Args:
        chunk_tokens: a multiple of every group's tokens per block.
        tokens_per_block: of each group.
    """

    def __init__(self, chunk_tokens: int, tokens_per_block: Sequence[int]) -> None:
        self.chunk_tokens = chunk_tokens
        self._blocks_per_chunk = tuple(chunk_tokens // tokens for tokens in tokens_per_block)
        self._root = Node(b"", None)
        self.known: tuple[dict[int, Entry], ...] = tuple({} for _ in tokens_per_block)
        """Per group, the entries of blocks on the device."""
        self._watched: deque[Entry] = deque()

    def walk(self, token_ids: Sequence[int], max_chunks: int) -> list[Node]:
        """Find the known chunks that ``token_ids`` begin with, at most ``max_chunks``, in token order."""
        nodes: list[Node] = []
        node: Node | None = self._root
        for tokens in self._chunks(token_ids, max_chunks):
            node = node.children.get(tokens) if node is not None else None
            if node is None:
                break
            nodes.append(node)
        return nodes

    def insert(self, token_ids: Sequence[int], tables: Sequence[BlockIds]) -> int:
        """Offer a request's blocks for the full chunks of ``token_ids``; what is on the device already stays.

        Args:
            token_ids: whose KV is complete.
            tables: a group each, from ordinal 0, −1 = not here.

        Returns:
            Full chunks, all of which can be found now as far as their blocks are there.

        Raises:
            ValueError: a block is known under other tokens; nothing was inserted.
        """
        chunks = list(self._chunks(token_ids, len(token_ids) // self.chunk_tokens))
        nodes = self.walk(token_ids, len(chunks))
        self._require_consistent(nodes, len(chunks), tables)
        node = nodes[-1] if nodes else self._root
        for tokens in chunks[len(nodes) :]:
            node = self._add_child(node, tokens)
            nodes.append(node)
        for position, node in enumerate(nodes):
            self._fill(node, position, tables)
        for node in reversed(nodes):
            self._prune(node)
        return len(chunks)

    def evict(self, group: int, block: int, stored: StoredBlock | None) -> None:
        """Hear that a block's contents left the device, for a tier or for good."""
        entry = self.known[group].pop(block)
        entry.block, entry.stored = NOT_HERE, stored
        if stored is not None and not entry.is_watched:
            entry.is_watched = True
            self._watched.append(entry)
        self._forget_dropped()
        self._prune(entry.node)

    def restore(self, group: int, entry: Entry, block: int) -> None:
        """Hear that an entry's contents are in a block of the device again.

        Where its chunk was forgotten on the way, and made anew by somebody else, the block stays unknown.
        """
        entry.stored = None
        if self._attach(entry.node):
            entry.block = block
            self.known[group][block] = entry

    def forget_stored(self, entry: Entry) -> None:
        """Hear that what a tier had is damaged or gone."""
        entry.stored = None
        self._prune(entry.node)

    def _chunks(self, token_ids: Sequence[int], max_chunks: int) -> Iterator[bytes]:
        count = min(len(token_ids) // self.chunk_tokens, max_chunks)
        data = np.asarray(token_ids[: count * self.chunk_tokens], dtype=np.int64).tobytes()
        step = self.chunk_tokens * 8
        return (data[start : start + step] for start in range(0, len(data), step))

    def _require_consistent(self, nodes: Sequence[Node], chunks: int, tables: Sequence[BlockIds]) -> None:
        for group, (known, per_chunk) in enumerate(zip(self.known, self._blocks_per_chunk, strict=True)):
            for ordinal, block in enumerate(tables[group][: chunks * per_chunk].tolist()):
                entry = known.get(block)
                if entry is None:
                    continue
                position, index = divmod(ordinal, per_chunk)
                if position >= len(nodes) or nodes[position].entries[group][index] is not entry:
                    raise ValueError(f"block {block} of group {group} was committed with other tokens before")

    def _add_child(self, parent: Node, tokens: bytes) -> Node:
        node = Node(tokens, parent)
        node.entries = tuple([Entry(node) for _ in range(count)] for count in self._blocks_per_chunk)
        parent.children[tokens] = node
        return node

    def _fill(self, node: Node, position: int, tables: Sequence[BlockIds]) -> None:
        for group, per_chunk in enumerate(self._blocks_per_chunk):
            blocks = tables[group][position * per_chunk : (position + 1) * per_chunk].tolist()
            for entry, block in zip(node.entries[group], blocks, strict=False):
                if block != NOT_HERE and not entry.is_on_device:
                    entry.block = block
                    self.known[group][block] = entry

    def _prune(self, node: Node) -> None:
        """Remove a chunk through which nothing is reached, and then perhaps its parents."""
        while node.parent is not None and node.is_empty and node.parent.children.get(node.tokens) is node:
            del node.parent.children[node.tokens]
            node = node.parent

    def _attach(self, node: Node) -> bool:
        """Undo ``_prune``: its chunk may have been empty for a moment. False = there is another one in its place."""
        detached: list[tuple[Node, Node]] = []
        while node.parent is not None and node.parent.children.get(node.tokens) is not node:
            if node.tokens in node.parent.children:
                return False
            detached.append((node.parent, node))
            node = node.parent
        for parent, child in detached:
            parent.children[child.tokens] = child
        return True

    def _forget_dropped(self) -> None:
        """Look at the two entries longest not looked at: often enough to keep up with what the tiers drop."""
        for _ in range(min(2, len(self._watched))):
            entry = self._watched.popleft()
            entry.is_watched = entry.is_stored
            if entry.is_watched:
                self._watched.append(entry)
            elif entry.stored is not None:
                self.forget_stored(entry)
