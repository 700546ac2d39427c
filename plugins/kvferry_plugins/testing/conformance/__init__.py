"""Suites that the author of a plugin runs by subclassing; each is loaded when it is named, and needs pytest."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvferry_plugins.testing.conformance.agents import (
        BlockTransferAgentConformance,
        InProcessAgentConformance,
        TransferAgentConformance,
    )
    from kvferry_plugins.testing.conformance.forwarding import ForwardingConformance, check_forwards
    from kvferry_plugins.testing.conformance.managers import KVCacheManagerConformance
    from kvferry_plugins.testing.conformance.models import ModelPluginConformance
    from kvferry_plugins.testing.conformance.transceivers import TransceiverConformance

__all__ = [
    "BlockTransferAgentConformance",
    "ForwardingConformance",
    "InProcessAgentConformance",
    "KVCacheManagerConformance",
    "ModelPluginConformance",
    "TransceiverConformance",
    "TransferAgentConformance",
    "check_forwards",
]

_HOMES: Final = {
    "BlockTransferAgentConformance": "agents",
    "ForwardingConformance": "forwarding",
    "InProcessAgentConformance": "agents",
    "KVCacheManagerConformance": "managers",
    "ModelPluginConformance": "models",
    "TransceiverConformance": "transceivers",
    "TransferAgentConformance": "agents",
    "check_forwards": "forwarding",
}


def __getattr__(name: str) -> Any:
    """Load a suite's module when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
