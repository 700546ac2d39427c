"""A KV-cache manager of plain memory, which remembers what is held: for tests, and for whoever writes a manager."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvferry_plugins.errors import CacheFullError
from kvferry_plugins.kv_cache import CacheStatistics, KVCacheManager
from kvferry_plugins.layout import BlockIds, KvLayout, LayerGroup, dense_pool
from kvferry_plugins.types import ManagerSpec, ModelGeometry

if TYPE_CHECKING:
    import torch

SMALL_GEOMETRY = ModelGeometry(num_layers=2, kv_heads=2, head_dim=8, dtype="float32", windows=(None, None))
"""A model whose blocks of four tokens are a kilobyte."""

SMALL_MANAGER = ManagerSpec("FAKE", SMALL_GEOMETRY, 4, 1024, 0.1, enable_block_reuse=True, device="cpu")


class FakeManager(KVCacheManager):
    """One dense pool of float32 in this process's memory, prefix reuse, and counts of every reference.

    Args:
        spec: of full attention in float32, with ``max_tokens``.
    """

    kind: ClassVar[str] = "FAKE"

    def __init__(self, spec: ManagerSpec = SMALL_MANAGER) -> None:
        geometry, tokens = spec.geometry, spec.tokens_per_block
        blocks = -(-(spec.max_tokens or 0) // tokens)
        layers = tuple(range(geometry.num_layers))
        shape = (blocks, len(layers), 2, geometry.kv_heads, tokens, geometry.head_dim)
        self.memory = np.zeros(shape, dtype=np.float32)
        pool = dense_pool(
            layers=layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            tokens_per_block=tokens,
            item_bytes=self.memory.itemsize,
            num_blocks=blocks,
            base=self.memory.ctypes.data,
        )
        group = LayerGroup(layers, (0,), tokens, geometry.kv_heads, geometry.head_dim)
        self._layout = KvLayout("float32", (group,), (pool,))
        self._tokens_per_block, self._blocks, self._reuse = tokens, blocks, spec.enable_block_reuse
        self._tables: dict[int, list[int]] = {}
        self._references: Counter[int] = Counter()
        self._holds: Counter[int] = Counter()
        self._prefixes: dict[tuple[int, ...], int] = {}
        """Tokens up to and with a committed block → the block, the least recently committed first."""
        self._reused = self._evicted = 0
        self._closed = False
        self._lock = threading.RLock()

    @property
    def held(self) -> dict[int, int]:
        """Block → how many holds it has; empty when nothing leaks."""
        with self._lock:
            return {block: count for block, count in sorted(self._holds.items()) if count}

    @property
    def layout(self) -> KvLayout:
        """Where the blocks are."""
        return self._layout

    def allocate(
        self,
        request_id: int,
        num_tokens: int,
        token_ids: Sequence[int] = (),
        *,
        max_cached_tokens: int | None = None,
        history_tokens: int = 0,
    ) -> int:
        """Share the committed prefix, and take the rest from what is free or can be evicted."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {num_tokens}")
        limit = num_tokens if max_cached_tokens is None else min(max_cached_tokens, num_tokens)
        with self._lock:
            self._require_open()
            if request_id in self._tables:
                raise ValueError(f"request {request_id} has blocks already")
            shared = self._prefix(token_ids, max(0, limit) // self._tokens_per_block)
            taken = self._take(self._ordinals(num_tokens) - len(shared), keep=shared)
            self._tables[request_id] = shared + taken
            self._references.update(shared + taken)
            self._reused += len(shared) * self._tokens_per_block
            return len(shared) * self._tokens_per_block

    def extend(self, request_id: int, num_tokens: int) -> None:
        """Add blocks to the request's end."""
        with self._lock:
            self._require_open()
            table = self._table(request_id)
            taken = self._take(self._ordinals(num_tokens) - len(table), keep=())
            table += taken
            self._references.update(taken)

    def block_table(self, request_id: int) -> tuple[BlockIds, ...]:
        """The request's blocks; a copy."""
        with self._lock:
            return (np.array(self._table(request_id), dtype=np.int32),)

    def commit(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Remember each full block by all tokens up to its end."""
        tokens, full = tuple(token_ids), len(token_ids) // self._tokens_per_block
        with self._lock:
            table = self._table(request_id)
            if full > len(table):
                raise ValueError(f"request {request_id} has {len(table)} blocks; {full} full ones cannot be committed")
            if not self._reuse:
                return 0
            known = {block: prefix for prefix, block in self._prefixes.items()}
            ends = [(tokens[: (number + 1) * self._tokens_per_block], table[number]) for number in range(full)]
            if any(known.get(block, prefix) != prefix for prefix, block in ends):
                raise ValueError(f"request {request_id} has committed other tokens before")
            for prefix, block in ends:
                self._prefixes.setdefault(prefix, block)
            return full * self._tokens_per_block

    def free(self, request_id: int) -> None:
        """Give the request's references back."""
        with self._lock:
            self._references.subtract(self._table(request_id))
            del self._tables[request_id]

    def hold(self, tables: Sequence[BlockIds]) -> None:
        """Count one more reference to each block."""
        with self._lock:
            blocks = self._present(tables)
            unused = [block for block in blocks if not self._references[block]]
            if unused:
                raise ValueError(f"blocks {unused} are not in use")
            self._references.update(blocks)
            self._holds.update(blocks)

    def release(self, tables: Sequence[BlockIds]) -> None:
        """Count one reference less to each block."""
        with self._lock:
            blocks = self._present(tables)
            missing = sorted(block for block, count in Counter(blocks).items() if count > self._holds[block])
            if missing:
                raise ValueError(f"blocks {missing} are not held")
            self._references.subtract(blocks)
            self._holds.subtract(blocks)

    def role_views(self, layer: int) -> "dict[str, torch.Tensor]":
        """Key and value of a layer."""
        import torch

        with self._lock:
            self._require_open()
        if layer not in self._layout.groups[0].layers:
            raise IndexError(f"layer {layer} is outside the model's {self.memory.shape[1]} layers")
        return {role: torch.from_numpy(self.memory[:, layer, which]) for which, role in enumerate(("key", "value"))}

    def statistics(self, group: int = 0) -> CacheStatistics:
        """Count the blocks."""
        if group != 0:
            raise IndexError(f"group {group} does not exist; this manager has one, 0")
        with self._lock:
            in_use = sum(count > 0 for count in self._references.values())
            cached = len(self._evictable(keep=()))
            return CacheStatistics(
                total=self._blocks,
                free=self._blocks - in_use - cached,
                cached=cached,
                in_use=in_use,
                reused_tokens=self._reused,
                evicted=self._evicted,
                block_bytes=self._layout.block_bytes(0),
            )

    def shutdown(self) -> None:
        """Refuse what is new; the memory goes with the object."""
        self._closed = True

    # --- blocks -------------------------------------------------------------------------------------------------

    def _prefix(self, token_ids: Sequence[int], at_most: int) -> list[int]:
        tokens, found = tuple(token_ids), list[int]()
        while self._reuse and len(found) < min(at_most, len(tokens) // self._tokens_per_block):
            block = self._prefixes.get(tokens[: (len(found) + 1) * self._tokens_per_block])
            if block is None:
                break
            found.append(block)
        return found

    def _take(self, count: int, *, keep: Sequence[int]) -> list[int]:
        cached = set(self._prefixes.values())
        free = [block for block in range(self._blocks) if not self._references[block] and block not in cached]
        evictable = self._evictable(keep=keep)
        if count > len(free) + len(evictable):
            room = len(free) + len(evictable)
            raise CacheFullError(
                f"{count} blocks are needed, {room} of {self._blocks} can be had; free a request",
                needed=count,
                free=room,
                total=self._blocks,
            )
        evicted = evictable[: max(0, count - len(free))]
        self._prefixes = {prefix: block for prefix, block in self._prefixes.items() if block not in evicted}
        self._evicted += len(evicted)
        return (free + evicted)[: max(0, count)]

    def _evictable(self, *, keep: Sequence[int]) -> list[int]:
        """Committed blocks that nobody has; the ends of prefixes first."""
        ordered = sorted(self._prefixes.items(), key=lambda entry: -len(entry[0]))
        return [block for _, block in ordered if not self._references[block] and block not in keep]

    def _present(self, tables: Sequence[BlockIds]) -> list[int]:
        if len(tables) != 1:
            raise ValueError(f"{len(tables)} tables for exactly one group")
        blocks = [int(block) for block in tables[0] if block != -1]
        outside = [block for block in blocks if not 0 <= block < self._blocks]
        if outside:
            raise ValueError(f"blocks {outside} are outside the pool")
        return blocks

    def _ordinals(self, num_tokens: int) -> int:
        return -(-num_tokens // self._tokens_per_block)

    def _table(self, request_id: int) -> list[int]:
        if request_id not in self._tables:
            raise KeyError(f"request {request_id} has no blocks here")
        return self._tables[request_id]

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this manager is shut down")
