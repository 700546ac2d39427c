"""The GLM family.

``GlmMoeDsaForCausalLM`` (GLM-5) prefers the PYTHON runtime: TensorRT-LLM #16524 (2026-07-23, confirmed by its tests and
by #16908's). It defaults to manager V2, which is the one here that holds latents (MLA).
"""

from collections.abc import Mapping
from typing import Any

from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeName


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> RuntimeName | None:
    return "PYTHON" if architecture == "GlmMoeDsaForCausalLM" else None


@hookimpl
def model_defaults(architecture: str) -> Mapping[str, Any] | None:
    if architecture != "GlmMoeDsaForCausalLM":
        return None
    return {"kv_cache_config": {"use_kv_cache_manager_v2": True}}
