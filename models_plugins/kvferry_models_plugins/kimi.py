"""The Kimi family.

``KimiK25ForConditionalGeneration`` prefers the PYTHON runtime: TensorRT-LLM #16482 (confirmed by its tests).
``KimiLinearForCausalLM`` needs a hybrid manager that kvferry does not have: no opinion here.
"""

from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeName


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> RuntimeName | None:
    return "PYTHON" if architecture == "KimiK25ForConditionalGeneration" else None
