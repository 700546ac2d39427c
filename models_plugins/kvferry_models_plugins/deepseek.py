"""The DeepSeek family.

``DeepseekV4ForCausalLM`` defaults to manager V2, through TensorRT-LLM's automatic choice of the manager (#15823).
Upstream's further defaults for it (blocks of 128 tokens, scratch reuse for sliding windows, a dtype by GPU
generation) go with its kernels, which kvferry does not run. It has no opinion about the runtime: upstream states one
for V3 and V3.2 (#16908), later than the semantics that kvferry implements, so those have no opinion at all.
"""

from collections.abc import Mapping
from typing import Any

from kvferry_plugins import hookimpl


@hookimpl
def model_defaults(architecture: str) -> Mapping[str, Any] | None:
    if architecture != "DeepseekV4ForCausalLM":
        return None
    return {"kv_cache_config": {"use_kv_cache_manager_v2": True}}
