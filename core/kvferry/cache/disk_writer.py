"""The thread that writes blocks to disk and deletes them, so that nobody who evicts waits for a disk."""

import contextlib
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvferry.cache.disk_store import BlockFile, DiskStore
from kvferry.cache.tier_blocks import Place, StoredBlock

_log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""How long a disk that failed is left alone."""

_CLOSE_SECONDS = 30.0
"""How long a disk that does not answer may hold up the end; what it has is cleaned by the next process then."""

_REMEDIES = {
    (errno.ENOENT, errno.ENOTDIR): "make that folder, or set kv_cache_config.disk_cache_path to one that is there",
    (errno.EACCES, errno.EPERM, errno.EROFS): "let this user write there, or set kv_cache_config.disk_cache_path",
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): "free some room there, or lower kv_cache_config.disk_cache_size",
}


class DiskWriter:
    """Writes in the order of arrival. Every method is called with ``changed`` held, which its thread shares.

    Args:
        store: the files; the thread is the only one that writes.
        changed: notified whenever a block was written, or could not be.
        on_attempt: told, with ``changed`` held, that the writing of a block ended; its ``file`` is there, or None.
        on_failed: told, with ``changed`` held, that the disk failed: what waits should not.
        retry_seconds: how long a disk that failed is left alone.
    """

    def __init__(
        self,
        store: DiskStore,
        changed: threading.Condition,
        *,
        on_attempt: Callable[[StoredBlock], None],
        on_failed: Callable[[], None],
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._store = store
        self._changed = changed
        self._on_attempt = on_attempt
        self._on_failed = on_failed
        self._retry_seconds = retry_seconds
        self._jobs: deque[StoredBlock | BlockFile] = deque()
        self._retry_at: float | None = None
        self._is_closing = False
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name="kvferry-disk-tier", daemon=True)

    def start(self) -> None:
        """Make the folder, and begin; a folder that cannot be had is a failure of the disk as any other."""
        try:
            self._store.open()
        except OSError as error:
            self.fail(error)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether the disk may be tried: it did not fail, or that was long ago."""
        return self._retry_at is None or time.monotonic() >= self._retry_at

    def write(self, block: StoredBlock) -> None:
        """Write a block's buffer, if it is still ``QUEUED`` when its turn comes."""
        self._jobs.append(block)
        self._changed.notify_all()

    def remove(self, file: BlockFile) -> None:
        """Delete a file, before anything that is written later."""
        self._jobs.append(file)
        self._changed.notify_all()

    def fail(self, error: OSError) -> None:
        """Leave the disk alone for a while; the first of several failures in a row is logged."""
        if self._retry_at is None:
            remedy = next((text for codes, text in _REMEDIES.items() if error.errno in codes), "look at the disk")
            _log.warning(
                "the disk tier in %s fails: %s; blocks are dropped instead of evicted to it, and it is tried again in "
                "%g s; %s",
                self._store.path,
                error,
                self._retry_seconds,
                remedy,
            )
        self.failures += 1
        self._retry_at = time.monotonic() + self._retry_seconds
        self._on_failed()
        self._changed.notify_all()

    def close(self) -> None:
        """End the thread, behind what it is doing, and delete the files. Called without ``changed``; once."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._store.close()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, StoredBlock):
                self._write(job)
            else:
                self._remove(job)

    def _next(self) -> StoredBlock | BlockFile | None:
        with self._changed:
            while not self._is_closing:
                if self._jobs and self.is_usable:
                    return self._jobs.popleft()
                self._changed.wait(self._seconds_to_wait())
            return None

    def _seconds_to_wait(self) -> float | None:
        if not self._jobs or self._retry_at is None:
            return None
        return max(0.0, self._retry_at - time.monotonic())

    def _write(self, block: StoredBlock) -> None:
        with self._changed:
            if block.place is not Place.QUEUED or block.buffer is None:
                return
            block.is_being_written = True
            buffer = block.buffer
        file: BlockFile | None = None
        failure: OSError | None = None
        try:
            file = self._store.write(block.serial, buffer)
        except OSError as error:
            failure = error
        with self._changed:
            block.is_being_written = False
            if failure is None:
                self._recover()
                block.file = file
            elif block.pinned and not block.dropped:
                self._jobs.appendleft(block)
            if failure is not None:
                self.fail(failure)
            self._on_attempt(block)
            self._changed.notify_all()

    def _remove(self, file: BlockFile) -> None:
        with contextlib.suppress(OSError):  # a file that stays goes with its folder
            self._store.remove(file)

    def _recover(self) -> None:
        if self._retry_at is not None:
            _log.info("the disk tier in %s works again", self._store.path)
        self._retry_at = None
