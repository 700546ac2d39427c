from kvferry_backends.nixl import create_transfer_agent
from kvferry_plugins.testing.conformance import TransferAgentConformance
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec


class TestNixl(TransferAgentConformance):
    has_wakeup = False

    def make_agent(self, name):
        return create_transfer_agent(AgentSpec("NIXL", name, "cpu", options={LOOPBACK_ONLY: True}))
