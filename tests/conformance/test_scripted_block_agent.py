"""The agent that the kit gives to transceivers runs the suite for agents."""

from kvferry_plugins.testing.block_agents import ScriptedBlockAgent
from kvferry_plugins.testing.conformance.agent_block_checks import BlockChecks
from kvferry_plugins.testing.conformance.agents import InProcessAgentConformance


class TestScriptedBlockAgent(BlockChecks, InProcessAgentConformance):
    names_library = False

    def make_agent(self, name):
        return ScriptedBlockAgent(name)
