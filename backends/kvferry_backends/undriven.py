"""What the backends say that are declared, but have no transfer agent yet."""

from typing import NoReturn

from kvferry_plugins.errors import BackendUnavailableError
from kvferry_plugins.types import AgentSpec


def refuse_agent(spec: AgentSpec) -> NoReturn:
    """Raise BackendUnavailableError, saying what works instead."""
    raise BackendUnavailableError(
        f"backend {spec.backend} has no transfer agent yet: "
        "set cache_transceiver_config.backend to NIXL and transceiver_runtime to PYTHON"
    )
