"""Declares the CPP runtime, which is not there yet: resolution answers as ever, building says so."""

from kvferry_plugins import hookimpl
from kvferry_plugins.errors import BackendUnavailableError
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import TransceiverRuntime, TransceiverSpec

_INSTEAD = (
    "the CPP runtime is not there yet: set cache_transceiver_config.transceiver_runtime to PYTHON, with backend NIXL"
)

# It claims nothing that no code does: pipelining and the rest are declared when kvferry_native brings them.
_RUNTIME = TransceiverRuntime(
    name="CPP", class_name="KvCacheTransceiverCpp", requires=("kvferry_native",), install=_INSTEAD
)


@hookimpl
def transceiver_runtimes() -> tuple[TransceiverRuntime, ...]:
    """Declare the runtime that moves bytes in native threads."""
    return (_RUNTIME,)


@hookimpl
def create_transceiver(spec: TransceiverSpec) -> KvCacheTransceiver:
    """Refuse. Raises BackendUnavailableError."""
    raise BackendUnavailableError(f"cannot build a transceiver on {spec.backend}: {_INSTEAD}")
