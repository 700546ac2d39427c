"""The Mistral family.

``MistralForCausalLM`` has no opinion: TensorRT-LLM #16787, which gave Llama and Gemma 3 theirs, explicitly left this
class unchanged, and kvferry matches architectures by name, never by inheritance. The module stands here so that
``kvferry plugins`` lists the family, and so that an opinion, once upstream has one, is one function.
"""

from kvferry_plugins import hookimpl


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> None:
    return None
