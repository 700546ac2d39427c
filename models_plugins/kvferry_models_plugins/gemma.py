"""The Gemma family.

``Gemma3ForCausalLM`` prefers the PYTHON runtime: TensorRT-LLM #16787 (confirmed by its tests and by #17396).
``Gemma3ForConditionalGeneration``, the multimodal wrapper, was explicitly left unchanged by #16787, and wrappers do not
inherit a preference upstream: no opinion here. Neither names a manager: V1.
"""

from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeName


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> RuntimeName | None:
    return "PYTHON" if architecture == "Gemma3ForCausalLM" else None
