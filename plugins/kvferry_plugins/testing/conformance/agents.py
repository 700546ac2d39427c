"""The conformance suites of transfer agents: subclass one, say how an agent is made, and run pytest."""

from typing import ClassVar

from kvferry_plugins.testing.conformance.agent_block_checks import BlockChecks
from kvferry_plugins.testing.conformance.agent_end_checks import CloseChecks, InProcessChecks, ProcessChecks
from kvferry_plugins.testing.conformance.agent_idle_checks import IdleChecks
from kvferry_plugins.testing.conformance.agent_memory_checks import MemoryChecks
from kvferry_plugins.testing.conformance.agent_peer_checks import PeerChecks
from kvferry_plugins.testing.conformance.agent_transfer_checks import TransferChecks


class TransferAgentConformance(TransferChecks, MemoryChecks, PeerChecks, IdleChecks, CloseChecks, ProcessChecks):
    """What kvferry needs of a transfer agent, between two processes.

    Each agent lives in a process of its own, as in production: the suite starts them, loads the subclass there from its
    file, and calls ``make_agent``. A crash or a hang of one is a failed check. ``AgentSuite`` has what may be declared.

    Example::

        class TestAcme(TransferAgentConformance):
            def make_agent(self, name):
                return AcmeAgent(AgentSpec("ACME", name, "cpu"))
    """


class BlockTransferAgentConformance(BlockChecks, TransferAgentConformance):
    """The same for an agent that takes whole block lists: a ``BlockTransferAgent``, for the CPP runtime."""


class InProcessAgentConformance(TransferChecks, MemoryChecks, PeerChecks, IdleChecks, CloseChecks, InProcessChecks):
    """For an agent that reaches no other process: a fake, or a copy within one host process."""

    in_process: ClassVar[bool] = True
