"""Rules that join two settings: checked on what both hold in the end, so that a model's default counts."""

from typing import Any

from kvferry.config import EngineArgs
from kvferry.resolution.defaults import ModelDefaults
from kvferry.resolution.vocabulary import BLOCK_SIZE, BUFFER
from kvferry_plugins.errors import ConfigError


def broken_rules(args: EngineArgs, defaults: ModelDefaults) -> list[ConfigError]:
    """Return one error a rule that the configuration breaks."""
    return [*_buffer_holds_whole_blocks(args, defaults), *_disk_has_a_place(args, defaults)]


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


def _disk_has_a_place(args: EngineArgs, defaults: ModelDefaults) -> list[ConfigError]:
    size, path = (_value(args, defaults, name) for name in ("disk_cache_size", "disk_cache_path"))
    if not size or path:
        return []
    return [
        ConfigError(
            "'kv_cache_config.disk_cache_size' needs a folder; set kv_cache_config.disk_cache_path",
            setting="kv_cache_config.disk_cache_path",
        )
    ]


def _value(args: EngineArgs, defaults: ModelDefaults, name: str) -> Any:
    return defaults.values.get(f"kv_cache_config.{name}", getattr(args.kv_cache_config, name))


def _plugin(defaults: ModelDefaults, setting: str) -> str | None:
    return next((decision.by for decision in defaults.decisions if decision.setting == setting), None)
