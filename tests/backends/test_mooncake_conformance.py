from kvferry_backends.mooncake import create_transfer_agent
from kvferry_plugins.testing.conformance import BlockTransferAgentConformance
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec


class TestMooncake(BlockTransferAgentConformance):
    lasting_agents = True

    def make_agent(self, name):
        spec = AgentSpec("MOONCAKE", name, "cpu", runtime="CPP", options={LOOPBACK_ONLY: True})
        return create_transfer_agent(spec)
