"""The Llama family.

``LlamaForCausalLM`` prefers the PYTHON runtime: TensorRT-LLM #16787 gave that preference to this class (confirmed by
its tests and by #19004). ``Llama4ForConditionalGeneration`` is another class, left unchanged by #16787: no opinion
here. Upstream's later preferences for manager V2 belong to the era after #18134, which kvferry does not follow.
"""

from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeName


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> RuntimeName | None:
    return "PYTHON" if architecture == "LlamaForCausalLM" else None
