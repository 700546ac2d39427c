"""The conformance suite of kvferry, on this backend: one subclass is all that it takes."""

from toytcp_kvferry.agent import ToyTcpAgent

from kvferry_plugins.testing.conformance import TransferAgentConformance
from kvferry_plugins.types import AgentSpec


class TestToyTcp(TransferAgentConformance):
    def make_agent(self, name):
        return ToyTcpAgent(AgentSpec("TOYTCP", name, "cpu"))
