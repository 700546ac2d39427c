"""What the author of a plugin tests with: fakes that need nothing but the contract."""

from kvferry_plugins.testing.agents import AgentCounters, ScriptedAgent, ScriptedHub

__all__ = ["AgentCounters", "ScriptedAgent", "ScriptedHub"]
