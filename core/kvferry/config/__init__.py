"""What an operator may write: the schema, the file it is read from, and the errors that say what is wrong in it."""

from kvferry.config.loading import load_engine_args, parse_engine_args
from kvferry.config.schema import CacheTransceiverConfig, EngineArgs, KvCacheConfig, PeerConfig, PluginsConfig

__all__ = [
    "CacheTransceiverConfig",
    "EngineArgs",
    "KvCacheConfig",
    "PeerConfig",
    "PluginsConfig",
    "load_engine_args",
    "parse_engine_args",
]
