"""UCX as a transfer backend: what it can do and whether it is here; its agent comes with the CPP runtime."""

from kvferry_backends.probing import library_findings
from kvferry_backends.undriven import refuse_agent
from kvferry_plugins import hookimpl
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import AgentSpec, ProbeReport, RuntimeSupport, TransferBackend

_BACKEND = TransferBackend(
    name="UCX",
    runtimes={"CPP": RuntimeSupport()},
    probe="kvferry_backends.ucx:probe",
    requires=("libucx",),
    install="pip install libucx-cu12",
)


@hookimpl
def transfer_backends() -> tuple[TransferBackend, ...]:
    return (_BACKEND,)


@hookimpl
def create_transfer_agent(spec: AgentSpec) -> TransferAgent:
    refuse_agent(spec)


def probe() -> ProbeReport:
    """Report what is installed; called in a process of its own."""
    return library_findings("libucx", distributions=("libucx-cu12", "libucx-cu13"))
