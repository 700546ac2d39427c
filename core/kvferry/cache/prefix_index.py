"""Which blocks hold the KV of which prompt prefix: full blocks, found by a chained hash of their tokens."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Digest = Callable[[bytes], bytes]


@dataclass(slots=True, eq=False)
class _Node:
    """One full block: its own tokens, and the node of everything before them."""

    block: int
    key: bytes
    tokens: bytes
    parent: "_Node | None"
    children: "set[_Node]" = field(default_factory=set)


class PrefixIndex:
    """Blocks by the tokens whose KV they hold. Not thread-safe; pure bookkeeping.

    A block's key is the digest of (its parent's key, its tokens). A hit counts only if the tokens are equal and the
    parent is the very node that was walked, so a digest that collides is a miss and never another prompt's KV.
    """

    def __init__(self, tokens_per_block: int, digest: Digest | None = None) -> None:
        self._tokens_per_block = tokens_per_block
        self._digest = digest or _blake2b
        self._by_key: dict[bytes, _Node] = {}
        self._by_block: dict[int, _Node] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def match(self, token_ids: Sequence[int], max_blocks: int) -> list[int]:
        """Blocks that hold the longest known prefix, at most ``max_blocks`` of them, in token order."""
        return [node.block for node in self._walk(self._chunks(token_ids, max_blocks))]

    def insert(self, token_ids: Sequence[int], blocks: Sequence[int]) -> int:
        """Offer ``blocks``, which hold the KV of the full blocks of ``token_ids``; what is known already stays.

        Returns:
            Leading blocks of ``token_ids`` that can be found now (fewer than offered only after a digest collision).

        Raises:
            ValueError: a block is known under other tokens; nothing was inserted.
        """
        chunks = self._chunks(token_ids, len(blocks))
        known = self._walk(chunks)
        new_blocks = blocks[len(known) : len(chunks)]
        for block in new_blocks:
            if block in self._by_block:
                raise ValueError(f"block {block} was committed with other tokens before")
        parent = known[-1] if known else None
        for position, block in enumerate(new_blocks, len(known)):
            node = self._node(block, chunks[position], parent)
            if node.key in self._by_key:
                return position
            self._add(node)
            parent = node
        return len(chunks)

    def remove(self, block: int) -> list[int]:
        """Forget a block, and all that follow it, since they can no longer be reached; returns the ids forgotten."""
        node = self._by_block[block]
        if node.parent is not None:
            node.parent.children.discard(node)
        forgotten: list[int] = []
        pending = [node]
        while pending:
            current = pending.pop()
            pending.extend(current.children)
            del self._by_key[current.key], self._by_block[current.block]
            forgotten.append(current.block)
        return forgotten

    def _chunks(self, token_ids: Sequence[int], max_blocks: int) -> list[bytes]:
        count = min(len(token_ids) // self._tokens_per_block, max_blocks)
        data = np.asarray(token_ids[: count * self._tokens_per_block], dtype=np.int64).tobytes()
        step = self._tokens_per_block * 8
        return [data[start : start + step] for start in range(0, len(data), step)]

    def _walk(self, chunks: list[bytes]) -> list[_Node]:
        nodes: list[_Node] = []
        parent: _Node | None = None
        for tokens in chunks:
            node = self._by_key.get(self._key(tokens, parent))
            if node is None or node.tokens != tokens or node.parent is not parent:
                break
            nodes.append(node)
            parent = node
        return nodes

    def _key(self, tokens: bytes, parent: _Node | None) -> bytes:
        return self._digest((parent.key if parent else b"") + tokens)

    def _node(self, block: int, tokens: bytes, parent: _Node | None) -> _Node:
        return _Node(block, self._key(tokens, parent), tokens, parent)

    def _add(self, node: _Node) -> None:
        self._by_key[node.key] = node
        self._by_block[node.block] = node
        if node.parent is not None:
            node.parent.children.add(node)


def _blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
