"""The tiers below the device: host memory, then disk, each with a byte limit of its own."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.cache.disk_store import HEADER_BYTES, DiskStore
from kvferry.cache.disk_writer import RETRY_SECONDS, DiskWriter
from kvferry.cache.host_store import Bytes, HostStore
from kvferry.cache.tier_blocks import Place, StoredBlock, Tier
from kvferry_plugins.errors import ConfigError, CorruptBlockError
from kvferry_plugins.kv_cache import TierStatistics

WRITE_BEHIND_BYTES = 64 << 20
"""Bytes of blocks on their way to the disk that host memory holds beside ``host_cache_size``."""

PATIENCE_SECONDS = 5.0
"""How long a pinned block waits for a disk that gets nothing done."""


def make_tiers(options: Mapping[str, Any], block_bytes: Sequence[int]) -> "Tiers | None":
    """Make the tiers that a ``kv_cache_config`` asks for; None where it asks for none.

    Args:
        options: with ``host_cache_size``, ``disk_cache_size`` (bytes or None) and ``disk_cache_path``.
        block_bytes: of a block, each group.

    Raises:
        ConfigError: a tier cannot hold the largest block, or the disk has no folder named.
    """
    sizes = {name: options.get(name) or 0 for name in ("host_cache_size", "disk_cache_size")}
    path = options.get("disk_cache_path")
    if not any(sizes.values()):
        return None
    if sizes["disk_cache_size"] and not path:
        setting = "kv_cache_config.disk_cache_path"
        raise ConfigError(f"'kv_cache_config.disk_cache_size' needs a folder; set {setting}", setting=setting)
    overheads = {"host_cache_size": 0, "disk_cache_size": HEADER_BYTES}
    for name, size in sizes.items():
        needed = max(block_bytes) + overheads[name]
        if 0 < size < needed:
            raise ConfigError(
                f"'kv_cache_config.{name}' is {size} bytes, and the largest block needs {needed}: raise it, set it to "
                "0, or lower kv_cache_config.tokens_per_block",
                setting=f"kv_cache_config.{name}",
            )
    return Tiers(sizes["host_cache_size"], sizes["disk_cache_size"], Path(path) if path else None)


class Tiers:
    """Blocks that left the device: in host memory, or on disk when that is full, the least recently used ones first.

    Thread-safe. Nobody who stores waits for the disk, but for a pinned block that finds room nowhere else. A disk that
    fails gets nothing for a while, which is said once; what it was to get is dropped, pinned blocks stay in memory.

    Args:
        host_bytes: limit of host memory; ``WRITE_BEHIND_BYTES`` come on top where there is a disk.
        disk_bytes: limit of all block files; 0 = no disk.
        disk_path: an existing folder; this process makes one of its own in it.
        write_behind_bytes: what may be on its way to the disk.
        retry_seconds: how long a disk that failed is left alone.
        patience_seconds: how long a pinned block waits for a disk that gets nothing done.
        disk: the files, if not of ``disk_path``.
    """

    def __init__(
        self,
        host_bytes: int,
        disk_bytes: int = 0,
        disk_path: Path | None = None,
        *,
        write_behind_bytes: int = WRITE_BEHIND_BYTES,
        retry_seconds: float = RETRY_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        disk: DiskStore | None = None,
    ) -> None:
        self._changed = threading.Condition()
        self._host = Tier("host", host_bytes)
        self._disk = Tier("disk", disk_bytes, overhead=HEADER_BYTES)
        self._write_behind = write_behind_bytes if disk_bytes else 0
        self._memory = HostStore(host_bytes + self._write_behind)
        self._queued_bytes = 0
        self._attempts = 0
        self._next_serial = 0
        self._patience = patience_seconds
        self._is_closed = False
        self._store = disk or (DiskStore(disk_path) if disk_path and disk_bytes else None)
        self._writer = self._make_writer(self._store, retry_seconds) if self._store else None
        if self._writer is not None:
            with self._changed:
                self._writer.start()

    @property
    def disk_failures(self) -> int:
        """How often the disk failed since the start."""
        return self._writer.failures if self._writer else 0

    @property
    def memory_bytes(self) -> int:
        """Host memory in use: the host tier's blocks and what is on its way to the disk."""
        with self._changed:
            return self._host.nbytes + self._queued_bytes

    def store(self, data: Bytes, *, group: int = 0, pinned: bool = False) -> StoredBlock | None:
        """Keep a copy of a block.

        Args:
            data: the block, uint8[n], contiguous.
            group: its layer group, for the figures.
            pinned: never drop it for others; it goes by ``drop`` alone.

        Returns:
            The block, wherever it will be; None = no room, or a failing disk.
        """
        with self._changed:
            while not self._is_closed:
                block = self._try_store(data, group, pinned)
                if block is not None or not (pinned and self._wait_for_the_disk()):
                    return block
        return None

    def load(self, block: StoredBlock, out: Bytes) -> None:
        """Copy a block's bytes to ``out``, uint8[n]; the block stays where it is.

        Raises:
            CorruptBlockError: it was dropped meanwhile, or its file is damaged: then it is dropped now, and ``out``
                may hold anything.
        """
        with self._changed:
            if block.dropped:
                raise CorruptBlockError(f"the block was dropped from the {self._tier(block).name} tier")
            self._tier(block).touch(block)
            if block.buffer is not None:
                np.copyto(out, block.buffer)
                self._tier(block).count_load(block)
                return
        self._read(block, out)
        with self._changed:
            self._disk.count_load(block)

    def set_pinned(self, block: StoredBlock, pinned: bool) -> None:
        """Say whether a block may be dropped for others from now; harmless on one that was dropped."""
        with self._changed:
            if not block.dropped:
                self._tier(block).set_pinned(block, pinned)

    def drop(self, block: StoredBlock) -> None:
        """Forget a block; harmless on one that was dropped."""
        with self._changed:
            if not block.dropped:
                self._forget(block)

    def statistics(self, group: int = 0) -> tuple[TierStatistics, ...]:
        """Count what each tier holds of a group; what is on its way to the disk counts as there."""
        with self._changed:
            return tuple(tier.statistics(group) for tier in (self._host, self._disk) if tier.limit)

    def close(self) -> None:
        """Drop everything, delete the files, end the thread; idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            for tier in (self._host, self._disk):
                for block in tier.blocks():
                    self._forget(block)
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.close()
        self._memory.clear()

    def _make_writer(self, store: DiskStore, retry_seconds: float) -> DiskWriter:
        return DiskWriter(
            store,
            self._changed,
            on_attempt=self._end_attempt,
            on_failed=self._lose_queued,
            retry_seconds=retry_seconds,
        )

    def _tier(self, block: StoredBlock) -> Tier:
        return self._host if block.place is Place.HOST else self._disk

    def _try_store(self, data: Bytes, group: int, pinned: bool) -> StoredBlock | None:
        if self._shrink_host(data.nbytes, pinned):
            place = Place.HOST
        elif self._shrink_disk(data.nbytes):
            place = Place.QUEUED
        else:
            return None
        buffer = self._memory.take(data.nbytes)
        if buffer is None:
            return None
        np.copyto(buffer, data)
        block = StoredBlock(self._next_serial, group, data.nbytes, pinned, Place.HOST, buffer)
        self._next_serial += 1
        if place is Place.HOST:
            self._host.add(block)
        else:
            self._queue(block)
        return block

    def _shrink_host(self, nbytes: int, pinned: bool) -> bool:
        """Make room in host memory; a pinned block pushes pinned ones to the disk too. Returns whether there is."""
        may_push = pinned and self._disk_is_usable()
        if nbytes > self._host.limit or not (self._host.could_hold(nbytes) or may_push):
            return False
        while not self._host.has_room(nbytes):
            oldest = self._host.oldest(pinned=pinned)
            if oldest is None:
                return False
            if self._shrink_disk(oldest.nbytes):
                self._host.remove(oldest)
                self._queue(oldest)
            elif oldest.pinned:
                return False
            else:
                self._forget(oldest, lost=True)
        return True

    def _shrink_disk(self, nbytes: int) -> bool:
        """Make room on the disk, and on the way to it; returns whether there is."""
        if not self._disk_is_usable() or not self._disk.could_hold(nbytes):
            return False
        if self._queued_bytes and self._queued_bytes + nbytes > self._write_behind:
            return False
        while not self._disk.has_room(nbytes):
            oldest = self._disk.oldest()
            assert oldest is not None
            self._forget(oldest, lost=True)
        return True

    def _disk_is_usable(self) -> bool:
        return self._writer is not None and self._writer.is_usable

    def _queue(self, block: StoredBlock) -> None:
        assert self._writer is not None
        block.place = Place.QUEUED
        self._disk.add(block)
        self._queued_bytes += block.nbytes
        self._writer.write(block)

    def _wait_for_the_disk(self) -> bool:
        """Wait until the writer has finished something; False = there is nothing to wait for, or no progress."""
        if not self._disk_is_usable() or not self._queued_bytes:
            return False
        before = self._attempts
        return self._changed.wait_for(lambda: self._attempts != before or self._is_closed, self._patience)

    def _end_attempt(self, block: StoredBlock) -> None:
        """The disk has a block now, or has failed to take it."""
        self._attempts += 1
        if block.dropped:
            self._release(block)
            self._remove_file(block)
        elif block.file is not None:
            self._release(block)
            block.place = Place.DISK

    def _lose_queued(self) -> None:
        """Drop what waits for a disk that failed, but for pinned blocks, which stay in memory until it works again."""
        for block in self._disk.blocks():
            if block.place is Place.QUEUED and not block.pinned:
                self._forget(block, lost=True)

    def _forget(self, block: StoredBlock, *, lost: bool = False) -> None:
        self._tier(block).remove(block, lost=lost)
        was_queued = block.place is Place.QUEUED
        block.place = Place.DROPPED
        if block.is_being_written:  # the writer reads the buffer; it tells when it is done
            return
        if was_queued:
            self._release(block)
        elif block.buffer is not None:
            self._memory.give(block.buffer)
            block.buffer = None
        self._remove_file(block)

    def _release(self, block: StoredBlock) -> None:
        """Give back the buffer of a block that was on its way to the disk."""
        if block.buffer is not None:
            self._memory.give(block.buffer)
            self._queued_bytes -= block.nbytes
        block.buffer = None

    def _remove_file(self, block: StoredBlock) -> None:
        if block.file is not None and self._writer is not None:
            self._writer.remove(block.file)
        block.file = None

    def _read(self, block: StoredBlock, out: Bytes) -> None:
        """Read a file without holding anybody up; who drops the block meanwhile makes it a dropped one."""
        assert self._store is not None
        file = block.file
        try:
            if file is None:
                raise CorruptBlockError("the block was dropped from the disk tier")
            self._store.read(file, out)
        except (OSError, CorruptBlockError) as error:
            with self._changed:
                if not block.dropped:
                    self._forget(block, lost=True)
                    if isinstance(error, OSError) and self._writer is not None:
                        self._writer.fail(error)
            if isinstance(error, CorruptBlockError):
                raise
            raise CorruptBlockError(f"a block of the disk tier cannot be read: {error}") from error
