"""Workers of the CPP runtime within this process, over the native transport whose peers live in one process."""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.testing.worker_pair import SHORT_CLOCKS, SMALL_GEOMETRY, SMALL_MODEL, Worker
from kvferry.transceiver.native_runtime import KvCacheTransceiverCpp
from kvferry_backends.native_agent import NativeAgent
from kvferry_plugins.layout import BlockIds, KvLayout, LayerGroup, Pool, RoleView
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec, ManagerSpec, Role, TransceiverSpec

TOKENS_PER_BLOCK = 4
BLOCK_BYTES = 1024
MANAGER = ManagerSpec("V1", SMALL_GEOMETRY, TOKENS_PER_BLOCK, 4096, 0.1, True, "cpu")


class ShuffledManager(KVCacheManagerV1):
    """Manager V1 after long service: a request's blocks are anywhere in the pool."""

    def block_table(self, request_id: int) -> tuple[BlockIds, ...]:
        return tuple(np.random.default_rng(7).permutation(table) for table in super().block_table(request_id))


class TwoPoolManager(KVCacheManagerV1):
    """A pool a layer, with room between keys and values and behind the block, as a host engine may have it."""

    def __init__(self, spec: ManagerSpec) -> None:
        super().__init__(spec)
        blocks = super().layout.pools[0].num_blocks
        self.memory = [np.zeros((blocks, 768), dtype=np.uint8) for _ in range(2)]
        pools = tuple(
            Pool(memory.ctypes.data, 768, blocks, (_view(layer, "key", 0), _view(layer, "value", 320)))
            for layer, memory in enumerate(self.memory)
        )
        self._two = KvLayout("float32", (LayerGroup((0, 1), (0, 1), TOKENS_PER_BLOCK, 2, 8),), pools)

    @property
    def layout(self) -> KvLayout:
        return self._two


def _view(layer: int, role: str, offset: int) -> RoleView:
    tokens = TOKENS_PER_BLOCK
    return RoleView(layer, role, offset, heads=2, head_stride=128, tokens=tokens, token_stride=32, row_bytes=32)


def specify(role: Role, manager: KVCacheManagerV1, make_agent: Any, config: Mapping[str, Any]) -> TransceiverSpec:
    shared = {**SHORT_CLOCKS, **config}
    return TransceiverSpec(role, "CPP", "INPROCESS", manager, make_agent, model=SMALL_MODEL, config=shared)


def make_native_agent(spec: AgentSpec, **transport: Any) -> NativeAgent:
    options = {key: value for key, value in spec.options.items() if key != LOOPBACK_ONLY}
    return NativeAgent(AgentSpec(spec.backend, spec.name, spec.device, {**options, **transport}, "CPP"), "inprocess")


@contextmanager
def running_native_worker(
    role: Role, *, config: Mapping[str, Any], agent: Mapping[str, Any], manager: type[KVCacheManagerV1]
) -> Iterator[Worker]:
    """One side; ``agent`` has options of the engine and of its transport."""
    made: list[TransferAgent] = []

    def make_agent(spec: AgentSpec) -> TransferAgent:
        made.append(make_native_agent(spec, **agent))
        return made[0]

    memory = manager(MANAGER)
    transceiver = KvCacheTransceiverCpp(specify(role, memory, make_agent, config))
    try:
        yield Worker(memory, transceiver, made[0])
    finally:
        transceiver.shutdown()
        memory.shutdown()


def open_things() -> tuple[int, int]:
    """Descriptors and threads of this process, the engines' own among them, without what only waits for Python."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
