"""What the author of a plugin tests with: fakes that need nothing but the contract."""

from kvferry_plugins.testing.agents import AgentCounters, ScriptedAgent, ScriptedHub
from kvferry_plugins.testing.models import FakeModelPlugin

__all__ = ["AgentCounters", "FakeModelPlugin", "ScriptedAgent", "ScriptedHub"]
