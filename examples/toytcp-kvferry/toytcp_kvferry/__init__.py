"""TOYTCP, a transfer backend over plain TCP sockets: what it can do, its agent, and its probe.

The declaration is read whenever kvferry resolves a configuration, so this module imports nothing but the contract; the
agent is imported by its maker, in the one process that chose it.
"""

import socket
from collections.abc import Mapping

from kvferry_plugins import hookimpl
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import AgentSpec, RuntimeSupport, TransferBackend

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


def probe() -> Mapping[str, object]:
    """Report whether it would work here; ``kvferry doctor`` runs this in a process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return {"installed": True, "location": __file__, "versions": {}, "listens": server.getsockname()[0]}
