"""Declares the CPP runtime; the transceiver itself is imported when one is built."""

from kvferry_plugins import hookimpl
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import ScheduleStyle, TransceiverRuntime, TransceiverSpec

_RUNTIME = TransceiverRuntime(
    name="CPP",
    class_name="KvCacheTransceiverCpp",
    pipelining=True,
    schedule_styles=frozenset({ScheduleStyle.CONTEXT_FIRST, ScheduleStyle.GENERATION_FIRST}),
    inflight_cancellation=True,
    timing=True,
    shared_pools=True,
    requires=("kvferry_native",),
    install="pip install 'kvferry[cpp]'",
)


@hookimpl
def transceiver_runtimes() -> tuple[TransceiverRuntime, ...]:
    """Declare the runtime that moves bytes in native threads."""
    return (_RUNTIME,)


@hookimpl
def create_transceiver(spec: TransceiverSpec) -> KvCacheTransceiver:
    """Build the transceiver; imports it here."""
    from kvferry.transceiver.native_runtime import KvCacheTransceiverCpp

    return KvCacheTransceiverCpp(spec)
