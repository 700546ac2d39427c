"""The DeepSeek family.

``DeepseekV3ForCausalLM`` and ``DeepseekV32ForCausalLM`` prefer the PYTHON runtime: TensorRT-LLM #16908 (2026-07-27,
confirmed by its tests), which names the rules of #16164 as its ground: those that kvferry implements. They default to
manager V2, which is the one here that holds latents (MLA); upstream, whose V1 does too, came to V2 later.

``DeepseekV4ForCausalLM`` defaults to manager V2, through TensorRT-LLM's automatic choice of the manager (#15823).
Upstream's further defaults for it (blocks of 128 tokens, scratch reuse for sliding windows, a dtype by GPU
generation) go with its kernels, which kvferry does not run. It has no opinion about the runtime.
"""

from collections.abc import Mapping
from typing import Any

from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeName

_V3 = frozenset({"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"})


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> RuntimeName | None:
    return "PYTHON" if architecture in _V3 else None


@hookimpl
def model_defaults(architecture: str) -> Mapping[str, Any] | None:
    if architecture not in _V3 and architecture != "DeepseekV4ForCausalLM":
        return None
    return {"kv_cache_config": {"use_kv_cache_manager_v2": True}}
