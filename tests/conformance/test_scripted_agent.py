"""The fake that harnesses use keeps the contract, in each of its ways."""

from kvferry_plugins.testing import ScriptedAgent
from kvferry_plugins.testing.conformance import InProcessAgentConformance


class TestScriptedAgent(InProcessAgentConformance):
    names_library = False

    def make_agent(self, name):
        return ScriptedAgent(name)


class TestScriptedAgentLikeNixl(InProcessAgentConformance):
    names_library = False
    has_wakeup = False

    def make_agent(self, name):
        return ScriptedAgent(name, wakeup=False, target_must_poll=True)
