"""Facts about the Acme models: they want the PYTHON transceiver, and blocks of 64 tokens.

Source: the Acme-7B model card (a made-up family; this distribution shows how a third party extends kvferry).
"""

from kvferry_plugins import hookimpl

ARCHITECTURE = "AcmeForCausalLM"


@hookimpl
def preferred_transceiver_runtime(architecture: str) -> str | None:
    """Prefer PYTHON for this architecture; no opinion about any other."""
    return "PYTHON" if architecture == ARCHITECTURE else None


@hookimpl
def model_defaults(architecture: str) -> dict[str, object] | None:
    """Fill what the user left open; what the user wrote stays."""
    return {"kv_cache_config": {"tokens_per_block": 64}} if architecture == ARCHITECTURE else None
