"""Frees a manager's memory once its transceiver is shut down, or keeps it where somebody may still write to it."""

import logging

from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.transceiver import KvCacheTransceiver

logger = logging.getLogger("kvferry.transceiver")

_kept: list[KVCacheManager] = []
"""To the end of the process: a write into freed memory would land in somebody else's."""


def shut_down_manager(manager: KVCacheManager, transceiver: KvCacheTransceiver | None) -> None:
    """Shut a manager down, unless its transceiver says that the memory is still in use; idempotent.

    Args:
        manager: the owner of the memory.
        transceiver: what moved its blocks, shut down by now; None if there was none.
    """
    reason = transceiver.memory_in_use if transceiver is not None else None
    if reason is None:
        manager.shutdown()
    elif not any(each is manager for each in _kept):
        _kept.append(manager)
        logger.error("the KV cache's memory is kept until this process ends: %s", reason)
