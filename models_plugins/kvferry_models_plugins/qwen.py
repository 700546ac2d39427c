"""The Qwen families with states: Qwen3-Next and Qwen3.5.

They prefer the PYTHON runtime: confirmed by TensorRT-LLM's tests, and in force for Qwen3-Next before PYTHON became
everybody's default (#17334's review, 2026-08-10; #18134 is of 2026-08-24). They default to no block reuse: #16768
(2026-07). Upstream gives hybrids a manager of their own, later V2; here V2 is the one that holds states.
"""

from collections.abc import Mapping
from typing import Any

from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeName

_ARCHITECTURES = frozenset(
    {
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    }
)


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> RuntimeName | None:
    return "PYTHON" if architecture in _ARCHITECTURES else None


@hookimpl
def model_defaults(architecture: str) -> Mapping[str, Any] | None:
    if architecture not in _ARCHITECTURES:
        return None
    return {"kv_cache_config": {"enable_block_reuse": False, "use_kv_cache_manager_v2": True}}
