"""A context and a generation worker in one process, over scripted agents: the whole protocol, no transport, no GPU."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.layout import Pool
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.transceiver import KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import AgentSpec, ManagerSpec, ModelGeometry, Role, TransceiverSpec, TransferRequest

if TYPE_CHECKING:
    import torch

    from kvferry.transceiver.python_runtime import KvCacheTransceiverV2

SMALL_GEOMETRY = ModelGeometry(num_layers=2, kv_heads=2, head_dim=8, dtype="float32", windows=(None, None))
"""A model whose blocks are a kilobyte or so."""

SMALL_MODEL = {"architecture": "FakeForCausalLM", "config": "c0", "weights": "w0"}

SHORT_CLOCKS: Mapping[str, Any] = {
    "kv_transfer_timeout_ms": 2_000,
    "kv_transfer_admission_timeout_ms": 2_000,
    "kv_transfer_poll_interval_ms": 1_000,
}
"""Clocks for tests that wait for one to run out."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One side of the pair."""

    manager: KVCacheManager
    transceiver: "KvCacheTransceiverV2"
    agent: TransferAgent
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    """Request → the tokens of its prompt, where they are known."""

    def blocks(self, request_id: int) -> "torch.Tensor":
        """A request's blocks as bytes, uint8[blocks, bytes a block], a copy.

        What lies behind the prompt's last token in its block is zero: it does not travel.
        """
        import ctypes

        import torch

        pool = self.manager.layout.pools[0]
        table = self.manager.block_table(request_id)[0]
        rows = [ctypes.string_at(pool.base + int(block) * pool.block_stride, pool.block_stride) for block in table]
        blocks = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(table), pool.block_stride)
        ordinal, tokens = divmod(self.prompt_tokens.get(request_id, 0), self.manager.layout.groups[0].tokens_per_block)
        if tokens:
            _clear_behind(blocks[ordinal], pool, tokens)
        return blocks

    def fill(self, request_id: int, seed: int) -> None:
        """Write random bytes, drawn from ``seed``, to a request's blocks."""
        import ctypes

        import torch

        pool = self.manager.layout.pools[0]
        generator = torch.Generator().manual_seed(seed)
        for block in self.manager.block_table(request_id)[0]:
            data = torch.randint(0, 256, (pool.block_stride,), dtype=torch.uint8, generator=generator)
            ctypes.memmove(pool.base + int(block) * pool.block_stride, data.data_ptr(), pool.block_stride)


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """A context and a generation worker that can reach each other."""

    context: Worker
    generation: Worker

    def prefill(self, request_id: int, prompt: tuple[int, ...], *, seed: int | None = None) -> TransferRequest:
        """Give a request blocks at the context worker and fill them, as a prefill would."""
        self.context.manager.allocate(request_id, len(prompt), prompt, max_cached_tokens=len(prompt) - 1)
        self.context.prompt_tokens[request_id] = len(prompt)
        self.context.fill(request_id, request_id if seed is None else seed)
        return TransferRequest(request_id, prompt)

    def admit(self, request: TransferRequest, request_id: int) -> TransferRequest:
        """Give the same prompt blocks at the generation worker; what it lacks is to be fetched."""
        prompt = request.prompt_token_ids
        cached = self.generation.manager.allocate(request_id, len(prompt), prompt)
        self.generation.prompt_tokens[request_id] = len(prompt)
        params = self.context.transceiver.get_disaggregated_params(request)
        return TransferRequest(request_id, prompt, cached_tokens=cached, params=params)


def _clear_behind(block: "torch.Tensor", pool: Pool, tokens: int) -> None:
    for view in pool.views:
        for head in range(view.heads):
            start = view.offset + head * view.head_stride
            block[start + tokens * view.token_stride : start + view.tokens * view.token_stride] = 0


@contextmanager
def worker_pair(
    *,
    context_agent: TransferAgent | None = None,
    generation_agent: TransferAgent | None = None,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    geometry: ModelGeometry = SMALL_GEOMETRY,
    tokens_per_block: int = 4,
    max_tokens: int = 1024,
) -> Iterator[WorkerPair]:
    """Run a pair with managers V1 and the PYTHON runtime; everything is shut down at the end.

    Args:
        context_agent: the writer; a faultless ``ScriptedAgent`` if not given.
        generation_agent: the target; where one agent alone is given, the other joins its hub.
        config: ``cache_transceiver_config`` over ``SHORT_CLOCKS``.
        generation_config: what differs on the generation side.
        geometry: the model's KV shape.
        tokens_per_block: of both managers.
        max_tokens: capacity of each manager.
    """
    given = (agent for agent in (context_agent, generation_agent) if isinstance(agent, ScriptedAgent))
    hub = next((agent.hub for agent in given), None) or ScriptedHub()
    agents = (
        context_agent or ScriptedAgent("context", hub=hub),
        generation_agent or ScriptedAgent("generation", hub=hub),
    )
    shared = {**SHORT_CLOCKS, **(config or {})}
    configs = (shared, {**shared, **(generation_config or {})})
    with ExitStack() as stack:
        context, generation = (
            stack.enter_context(
                running_worker(
                    role, agent, own, geometry=geometry, tokens_per_block=tokens_per_block, max_tokens=max_tokens
                )
            )
            for role, agent, own in zip(Role, agents, configs, strict=True)
        )
        yield WorkerPair(context, generation)


@contextmanager
def running_worker(
    role: Role,
    agent: TransferAgent,
    config: Mapping[str, Any],
    *,
    geometry: ModelGeometry = SMALL_GEOMETRY,
    tokens_per_block: int = 4,
    max_tokens: int = 1024,
    model: Mapping[str, str] = SMALL_MODEL,
    backend: str = "SCRIPTED",
) -> Iterator[Worker]:
    """Run one side: a manager V1 and a PYTHON transceiver over ``agent``."""
    from kvferry.cache.manager_v1 import KVCacheManagerV1
    from kvferry.transceiver.memory_in_use import shut_down_manager
    from kvferry.transceiver.python_runtime import KvCacheTransceiverV2

    def create_agent(_: AgentSpec) -> TransferAgent:
        return agent

    manager = KVCacheManagerV1(ManagerSpec("V1", geometry, tokens_per_block, max_tokens, 0.1, True, "cpu"))
    transceiver: KvCacheTransceiver | None = None
    try:
        transceiver = KvCacheTransceiverV2(
            TransceiverSpec(role, "PYTHON", backend, manager, create_agent, model=model, config=dict(config))
        )
        yield Worker(manager, transceiver, agent)
    finally:
        if transceiver is not None:
            transceiver.shutdown()
        shut_down_manager(manager, transceiver)
