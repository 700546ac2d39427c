from kvferry_backends import nixl, ucx
from kvferry_plugins.testing.conformance import BlockTransferAgentConformance
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

OPTIONS = {LOOPBACK_ONLY: True}


class TestNixl(BlockTransferAgentConformance):
    def make_agent(self, name):
        return nixl.create_transfer_agent(AgentSpec("NIXL", name, "cpu", runtime="CPP", options=OPTIONS))


class TestUcx(BlockTransferAgentConformance):
    def make_agent(self, name):
        return ucx.create_transfer_agent(AgentSpec("UCX", name, "cpu", runtime="CPP", options=OPTIONS))
