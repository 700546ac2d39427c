"""Rules that join settings, or a setting and the checkpoint: checked on what holds in the end, defaults included."""

from typing import Any

from kvferry.checkpoint import ModelSpec
from kvferry.config import EngineArgs
from kvferry.resolution.defaults import ModelDefaults
from kvferry.resolution.topology import broken_topology
from kvferry.resolution.vocabulary import BLOCK_SIZE, BUFFER, DISK_PATH, DISK_SIZE
from kvferry_plugins.errors import ConfigError


def broken_rules(args: EngineArgs, defaults: ModelDefaults, model: ModelSpec | None) -> list[ConfigError]:
    """Return one error a rule that the configuration breaks."""
    return [
        *_buffer_holds_whole_blocks(args, defaults),
        *_disk_has_place_and_size(args, defaults),
        *broken_topology(args, model),
    ]


def _buffer_holds_whole_blocks(args: EngineArgs, defaults: ModelDefaults) -> list[ConfigError]:
    buffer = args.cache_transceiver_config.max_tokens_in_buffer if args.cache_transceiver_config else None
    block: int = defaults.values.get(BLOCK_SIZE, args.kv_cache_config.tokens_per_block)
    if buffer is None or buffer % block == 0:
        return []
    below, above = buffer // block * block, (buffer // block + 1) * block
    nearest = f"nearest are {below} and {above}" if below else f"smallest is {above}"
    by_model = f" (a default of {_plugin(defaults, BLOCK_SIZE)})" if BLOCK_SIZE in defaults.values else ""
    return [
        ConfigError(
            f"{BUFFER!r} should be a multiple of tokens_per_block, which is {block}{by_model}, but is {buffer}; "
            f"the {nearest}",
            setting=BUFFER,
        )
    ]


def _disk_has_place_and_size(args: EngineArgs, defaults: ModelDefaults) -> list[ConfigError]:
    size, path = (cache_setting(args, defaults, name) for name in (DISK_SIZE, DISK_PATH))
    if size and not path:
        return [ConfigError(f"{DISK_SIZE!r} needs a folder; set {DISK_PATH}", setting=DISK_PATH)]
    if path and size is None:
        message = f"{DISK_PATH!r} is {path!r}, and nothing says how much may lie there; set {DISK_SIZE} to bytes"
        return [ConfigError(message, setting=DISK_SIZE)]
    return []


def cache_setting(args: EngineArgs, defaults: ModelDefaults, setting: str) -> Any:
    """Return what a ``kv_cache_config`` setting holds in the end."""
    return defaults.values.get(setting, getattr(args.kv_cache_config, setting.rpartition(".")[2]))


def _plugin(defaults: ModelDefaults, setting: str) -> str | None:
    return next((decision.by for decision in defaults.decisions if decision.setting == setting), None)
