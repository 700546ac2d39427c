"""NIXL as a transfer backend: what it can do, whether it is here, and its agent."""

from kvferry_plugins import hookimpl
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import AgentSpec, RuntimeSupport, TransferBackend

_BACKEND = TransferBackend(
    name="NIXL",
    # A finite timeout under PYTHON: as TensorRT-LLM's Python transceiver, whose constructor refuses null.
    runtimes={"PYTHON": RuntimeSupport(needs_finite_timeout=True), "CPP": RuntimeSupport()},
    probe="kvferry_backends.nixl_probe:probe",
    requires=("nixl", "torch"),
    install="pip install 'kvferry[nixl]'",
    baseline="kvferry_backends.nixl_raw",
)


@hookimpl
def transfer_backends() -> tuple[TransferBackend, ...]:
    return (_BACKEND,)


@hookimpl
def create_transfer_agent(spec: AgentSpec) -> TransferAgent:
    if spec.runtime == "CPP":
        return _native_agent(spec)
    from kvferry_backends.nixl_agent import NixlAgent

    return NixlAgent(spec)


def _native_agent(spec: AgentSpec) -> TransferAgent:
    from kvferry_backends.loopback import (
        keep_nixl_on_loopback,
        leave_out_infiniband_where_there_is_none,
        take_loopback_option,
    )
    from kvferry_backends.native_agent import NativeAgent

    spec, on_loopback = take_loopback_option(spec)
    if on_loopback:
        keep_nixl_on_loopback()
    leave_out_infiniband_where_there_is_none()
    return NativeAgent(spec, "nixl")
