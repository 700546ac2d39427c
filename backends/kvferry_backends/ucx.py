"""UCX as a transfer backend: what it can do, whether it is here, and its native agent."""

import dataclasses
import os

from kvferry_plugins import hookimpl
from kvferry_plugins.transceiver import TransferAgent
from kvferry_plugins.types import AgentSpec, RuntimeSupport, TransferBackend

_BACKEND = TransferBackend(
    name="UCX",
    runtimes={"CPP": RuntimeSupport()},
    probe="kvferry_backends.ucx_probe:probe",
    requires=("libucx",),
    install="pip install libucx-cu12",
    baseline="kvferry_backends.ucx_raw",
)


@hookimpl
def transfer_backends() -> tuple[TransferBackend, ...]:
    return (_BACKEND,)


@hookimpl
def create_transfer_agent(spec: AgentSpec) -> TransferAgent:
    from kvferry_backends.loopback import LOOPBACK_DEVICE, UCX_NET_DEVICES, take_loopback_option
    from kvferry_backends.native_agent import NativeAgent

    spec, on_loopback = take_loopback_option(spec)
    if on_loopback and UCX_NET_DEVICES not in os.environ:
        spec = dataclasses.replace(spec, options={**spec.options, "NET_DEVICES": LOOPBACK_DEVICE})
    return NativeAgent(spec, "ucx")
