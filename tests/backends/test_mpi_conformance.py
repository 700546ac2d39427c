from kvferry_backends.mpi import create_transfer_agent
from kvferry_backends.mpi_launch import launch
from kvferry_plugins.testing.conformance import BlockTransferAgentConformance
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec


class TestMpi(BlockTransferAgentConformance):
    """A world of two, which nobody joins and which is over with either: said by declaration."""

    one_world = True
    several_peers = False
    agents_come_and_go = False
    reconnects = False

    def launch(self, commands):
        return launch(commands)

    def make_agent(self, name):
        return create_transfer_agent(AgentSpec("MPI", name, "cpu", runtime="CPP", options={LOOPBACK_ONLY: True}))
