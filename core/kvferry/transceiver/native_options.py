"""From the transceiver's configuration to the native engine's options: the one place where that is done."""

from collections.abc import Mapping
from typing import Any

from kvferry.cache.memory import available_memory
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.layout import KvLayout
from kvferry_plugins.types import COPY_THREADS, MAP_PEERS, STAGING_BYTES, Role

_BUFFER = "cache_transceiver_config.max_tokens_in_buffer"


def native_options(config: Mapping[str, Any], layout: KvLayout, role: Role) -> dict[str, object]:
    """Return options for ``AgentSpec``; what the configuration leaves open is the engine's own choice.

    Args:
        config: the effective ``cache_transceiver_config``.
        layout: of the manager, which says what a token takes.
        role: only a context worker writes. Whoever maps a peer's pool keeps its memory from being freed.

    Raises:
        ConfigError: ``max_tokens_in_buffer`` holds no block of some layer group, or more than memory has free.
    """
    options: dict[str, object] = {
        MAP_PEERS: role is Role.CONTEXT and bool(config.get("kv_transfer_shared_memory", True))
    }
    threads = config.get("kv_transfer_threads")
    if threads is not None:
        options[COPY_THREADS] = threads
    tokens = config.get("max_tokens_in_buffer")
    if tokens is not None:
        options[STAGING_BYTES] = _staging_bytes(tokens, layout)
    return options


def _staging_bytes(tokens: int, layout: KvLayout) -> int:
    largest = max(group.tokens_per_block for group in layout.groups)
    if tokens < largest:
        raise ConfigError(
            f"{_BUFFER!r} is {tokens} tokens, less than one block of {largest}; set it to {largest} or more",
            setting=_BUFFER,
        )
    nbytes = sum(
        tokens * layout.block_bytes(index) // group.tokens_per_block for index, group in enumerate(layout.groups)
    )
    available = available_memory("cpu")
    if nbytes > available:
        raise ConfigError(
            f"{_BUFFER!r} is {tokens} tokens = {nbytes} bytes, but only {available} bytes of memory are available; "
            f"set it to {tokens * available // nbytes // largest * largest} or less",
            setting=_BUFFER,
        )
    return nbytes
