"""Mooncake as a transfer backend: what it can do, whether it is here, and its agent."""

from kvferry_plugins import hookimpl
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import AgentSpec, RuntimeSupport, TransferBackend

_BACKEND = TransferBackend(
    name="MOONCAKE",
    runtimes={"CPP": RuntimeSupport()},
    probe="kvferry_backends.mooncake_probe:probe",
    requires=("mooncake",),
    install="pip install mooncake-transfer-engine-non-cuda",
    baseline="kvferry_backends.mooncake_raw",
)


@hookimpl
def transfer_backends() -> tuple[TransferBackend, ...]:
    return (_BACKEND,)


@hookimpl
def create_transfer_agent(spec: AgentSpec) -> TransferAgent:
    from kvferry_backends.mooncake_agent import MooncakeAgent

    return MooncakeAgent(spec)
