"""What the author of a plugin tests with: fakes and conformance suites that need nothing but the contract, and pytest.

Each is loaded when it is named, so that the pytest plugin in this package costs a test session nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvferry_plugins.testing.agents import AgentCounters, ScriptedAgent, ScriptedHub
    from kvferry_plugins.testing.block_agents import ScriptedBlockAgent
    from kvferry_plugins.testing.conformance import (
        ModelPluginConformance,
        TransceiverConformance,
        TransferAgentConformance,
    )
    from kvferry_plugins.testing.managers import FakeManager
    from kvferry_plugins.testing.models import FakeModelPlugin

__all__ = [
    "AgentCounters",
    "FakeManager",
    "FakeModelPlugin",
    "ModelPluginConformance",
    "ScriptedAgent",
    "ScriptedBlockAgent",
    "ScriptedHub",
    "TransceiverConformance",
    "TransferAgentConformance",
]

_HOMES: Final = {
    "AgentCounters": "agents",
    "FakeManager": "managers",
    "FakeModelPlugin": "models",
    "ModelPluginConformance": "conformance",
    "ScriptedAgent": "agents",
    "ScriptedBlockAgent": "block_agents",
    "ScriptedHub": "agents",
    "TransceiverConformance": "conformance",
    "TransferAgentConformance": "conformance",
}


def __getattr__(name: str) -> Any:
    """Load a module when what it has is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
