"""The Kimi family.

``KimiK25ForConditionalGeneration`` prefers the PYTHON runtime: TensorRT-LLM #16482 (2026-07, confirmed by its tests).
It defaults to manager V2, which is the one here that holds latents (MLA).

``KimiLinearForCausalLM`` (K3, latents and states) prefers the PYTHON runtime: TensorRT-LLM #17480 (2026-08-10, read in
source and tests). There it is a requirement, since upstream's C++ transceiver cannot move states; kvferry's can.
Without block reuse and with blocks of 64 tokens: upstream's defaults (read in source and tests). The latter go with
its kernels, but are kept, since two sides must agree on them. Upstream gives it a hybrid manager; here that is V2.
"""

from collections.abc import Mapping
from typing import Any

from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeName

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "KimiK25ForConditionalGeneration": {"use_kv_cache_manager_v2": True},
    "KimiLinearForCausalLM": {
        "use_kv_cache_manager_v2": True,
        "enable_block_reuse": False,
        "tokens_per_block": 64,
    },
}


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> RuntimeName | None:
    return "PYTHON" if architecture in _DEFAULTS else None


@hookimpl
def model_defaults(architecture: str) -> Mapping[str, Any] | None:
    found = _DEFAULTS.get(architecture)
    return {"kv_cache_config": dict(found)} if found else None
