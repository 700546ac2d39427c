"""The native engine: C++ threads that move KV blocks over a transport that is chosen by name."""

from kvferry_native._engine import BlockMap, Engine, EngineError, pack_descriptor, unpack_descriptor
from kvferry_native.libraries import TransportUnavailableError, transport_path, usable

__all__ = [
    "BlockMap",
    "Engine",
    "EngineError",
    "TransportUnavailableError",
    "pack_descriptor",
    "transport_path",
    "unpack_descriptor",
    "usable",
]
