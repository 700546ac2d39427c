"""GPT-OSS.

``GptOssForCausalLM`` prefers the PYTHON runtime: TensorRT-LLM #16479 (confirmed by its tests). Upstream has also given
it manager V2, first in its defaults, then as a preference (#16942); kvferry follows the semantics before that, so it
has no wish for a manager here: V1.
"""

from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeName


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> RuntimeName | None:
    return "PYTHON" if architecture == "GptOssForCausalLM" else None
