"""Aggregated decoding in the demo's own process: an engine of its own, with no transceiver, for comparison."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from kvferry.checkpoint import load_model_spec, model_geometry
from kvferry.config import parse_engine_args
from kvferry.dispatcher import build, resolve
from kvferry.integrations.checkpoints import Progress
from kvferry.integrations.transformers.engine import GenerationRequest, PagedEngine
from kvferry.integrations.transformers.loading import load_model
from kvferry.registry.door import Registry
from kvferry.serving.worker import limit_threads
from kvferry_plugins.types import Role


class Reference:
    """Decodes prompts one after another, sharing prefixes as the workers do."""

    def __init__(self, engine: PagedEngine) -> None:
        self._engine = engine
        self._ids = count()

    def decode(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """The output's tokens, greedy."""
        running = self._engine.prefill(GenerationRequest(next(self._ids), tuple(prompt), max_tokens))
        return tuple(self._engine.decode(running))


@contextmanager
def reference_engine(
    settings: dict[str, Any], folder: Path, registry: Registry, *, prefill_chunk: int, progress: Progress
) -> Iterator[Reference]:
    """Build and load a third engine.

    Args:
        settings: the workers' engine configuration; the transceiver is left out.
        folder: the checkpoint.
        registry: the demo's.
        prefill_chunk: as the workers'.
        progress: told while the model loads.
    """
    alone = {key: value for key, value in settings.items() if key not in ("cache_transceiver_config", "peers")}
    spec = load_model_spec(folder)
    plan = resolve(parse_engine_args(alone), model=spec, registry=registry, environ=os.environ)
    cache_config = plan.effective["kv_cache_config"]
    dtype, windows = cache_config["dtype"], cache_config["max_attention_window"]
    geometry = model_geometry(spec.pretrained_config or {}, dtype, max_attention_window=windows)
    parts = build(plan, registry=registry, role=Role.GENERATION, geometry=geometry, model_identity={})
    try:
        limit_threads()
        device = parts.manager.layout.pools[0].device
        loaded = load_model(folder, dtype, device=device, progress=progress)
        yield Reference(PagedEngine(loaded, parts.manager, prefill_chunk=prefill_chunk))
    finally:
        parts.shutdown()
