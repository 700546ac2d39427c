"""TOYTCP, a transfer backend over plain TCP sockets: what it can do, its agent, and its probe.

The declaration is read whenever kvferry resolves a configuration, so this module imports nothing but the contract; the
agent is imported by its maker, in the one process that chose it.
"""

from kvferry_plugins import hookimpl
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import AgentSpec, ProbeReport, RuntimeSupport, TransferBackend

BACKEND = TransferBackend(
    name="TOYTCP",
    # CPP would need an agent that takes whole block lists (BlockTransferAgent): `auto` falls back to PYTHON.
    runtimes={"PYTHON": RuntimeSupport()},
    probe="toytcp_kvferry:probe",
    # Sockets are Python's own. A backend over a library names its module here, and in `install` what brings it:
    # where it is absent, kvferry says so and builds nothing.
    requires=(),
)


@hookimpl
def transfer_backends() -> tuple[TransferBackend, ...]:
    """Declare the backend."""
    return (BACKEND,)


@hookimpl
def create_transfer_agent(spec: AgentSpec) -> TransferAgent:
    """Make its agent; asked only where the plan names this plugin."""
    from toytcp_kvferry.agent import ToyTcpAgent

    return ToyTcpAgent(spec)


def probe() -> ProbeReport:
    """Report whether an agent would start here, by starting one; ``kvferry doctor`` asks in a process of its own."""
    from toytcp_kvferry.agent import ToyTcpAgent

    ToyTcpAgent(AgentSpec(BACKEND.name, "probe", "cpu")).close()
    return ProbeReport(usable=True, library=ToyTcpAgent.library, transports=["tcp"], problems=[], memory=["host"])
