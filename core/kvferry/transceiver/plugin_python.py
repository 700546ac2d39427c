"""Declares the PYTHON runtime; the transceiver itself is imported when one is built."""

from kvferry_plugins import hookimpl
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import ScheduleStyle, TransceiverRuntime, TransceiverSpec

_RUNTIME = TransceiverRuntime(
    name="PYTHON",
    class_name="KvCacheTransceiverV2",
    pipelining=True,
    schedule_styles=frozenset({ScheduleStyle.CONTEXT_FIRST, ScheduleStyle.GENERATION_FIRST}),
    inflight_cancellation=True,
    timing=True,
)


@hookimpl
def transceiver_runtimes() -> tuple[TransceiverRuntime, ...]:
    """Declare the runtime that drives any agent from Python."""
    return (_RUNTIME,)


@hookimpl
def create_transceiver(spec: TransceiverSpec) -> KvCacheTransceiver:
    """Build the transceiver; imports it here."""
    from kvferry.transceiver.python_runtime import KvCacheTransceiverV2

    return KvCacheTransceiverV2(spec)
