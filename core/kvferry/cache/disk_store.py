"""Block files of one process: written whole or not at all, checked when read, gone with the process."""

import contextlib
import errno
import fcntl
import os
import shutil
import struct
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry_plugins.errors import CorruptBlockError

Bytes = NDArray[np.uint8]

FOLDER_PREFIX = "kvferry-blocks-"
"""What the folder of a process begins with, below the configured one."""
_LOCK = "lock"
_HEADER = struct.Struct("<4sHHIQQ")
_MAGIC = b"KVFB"
_VERSION = 1
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A written block, and what its file must hold to be it."""

    serial: int
    nbytes: int
    checksum: int

    def header(self) -> bytes:
        """Magic, format version, reserved, CRC-32 of the contents, serial number, length; little endian."""
        return _HEADER.pack(_MAGIC, _VERSION, 0, self.checksum, self.serial, self.nbytes)


class DiskStore:
    """Files in a folder that belongs to this process alone; it is made when first needed, or made again.

    The folder holds a locked file for as long as its process lives, so that others can tell who is dead. Folders of
    dead processes are removed and never read. Any method may raise OSError; ``write`` has left no file then.

    Args:
        path: an existing folder, which other processes may use too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder: Path | None = None
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        """The configured folder."""
        return self._path

    def open(self) -> None:
        """Make this process's folder where there is none (any more), and remove those of dead processes."""
        if self._folder is not None and self._folder.is_dir():
            return
        self._unlock()
        if not self._path.is_dir():
            raise FileNotFoundError(errno.ENOENT, "it is no existing folder", str(self._path))
        name = f"{FOLDER_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        new = self._path / f".new-{name}"
        new.mkdir(mode=0o700)
        try:
            self._lock = _try_lock(new / _LOCK, create=True)
            self._folder = new.rename(self._path / name)  # with its lock taken: nobody can think it dead
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise
        for folder in _dead_folders(self._path):
            shutil.rmtree(folder, ignore_errors=True)

    def write(self, serial: int, data: Bytes) -> BlockFile:
        """Write a block under a number that no other block of this process has."""
        self.open()
        block = BlockFile(serial, data.nbytes, zlib.crc32(data.data))
        file = self._file(serial)
        unfinished = file.with_suffix(".part")
        try:
            _write_all(unfinished, [memoryview(block.header()), data.data])
            unfinished.rename(file)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return block

    def read(self, block: BlockFile, out: Bytes) -> None:
        """Read a block into ``out``, which holds anything if this raises.

        Raises:
            CorruptBlockError: the file is not what was written.
            OSError: it cannot be read.
        """
        file = self._file(block.serial)
        header = bytearray(HEADER_BYTES)
        descriptor = self._open_block(file)
        try:
            size = os.fstat(descriptor).st_size
            if size != HEADER_BYTES + block.nbytes or not _read_all(descriptor, [memoryview(header), out.data]):
                raise CorruptBlockError(
                    f"{file} has {size} bytes, not {HEADER_BYTES + block.nbytes}: it was changed or cut off"
                )
        finally:
            os.close(descriptor)
        if bytes(header) != block.header():
            raise CorruptBlockError(f"{file} does not begin as it was written: it was changed, or is another block")
        if zlib.crc32(out.data) != block.checksum:
            raise CorruptBlockError(f"{file} fails its checksum: the disk or somebody else changed it")

    def remove(self, block: BlockFile) -> None:
        """Delete a block's file."""
        self._file(block.serial).unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all files of this process; idempotent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
        self._unlock()

    def _file(self, serial: int) -> Path:
        if self._folder is None:
            raise FileNotFoundError(errno.ENOENT, "this process has no folder in it", str(self._path))
        return self._folder / f"{serial}.block"

    def _open_block(self, file: Path) -> int:
        try:
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            if not file.parent.is_dir():
                raise
            raise CorruptBlockError(f"{file} is gone: somebody removed it") from error

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def _dead_folders(path: Path) -> Iterator[Path]:
    """Yield folders whose process is gone, each locked while it is looked at, so that one process cleans it."""
    for folder in path.glob(f"{FOLDER_PREFIX}*"):
        try:
            lock = _try_lock(folder / _LOCK, create=False)
        except FileNotFoundError:  # half removed: a living one has its lock before it has its name
            yield folder
            continue
        except OSError:  # another user's
            continue
        if lock is not None:
            try:
                yield folder
            finally:
                os.close(lock)


def _try_lock(file: Path, *, create: bool) -> int | None:
    """Lock a file for this process; None = another one has it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if create else 0)
    descriptor = os.open(file, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write_all(file: Path, left: list[memoryview]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        while left:
            written = os.writev(descriptor, left)
            left = _behind(left, written)
    finally:
        os.close(descriptor)  # some file systems say only here that they are full


def _read_all(descriptor: int, left: list[memoryview]) -> bool:
    """Fill all parts; False = the file ended before."""
    while left:
        received = os.readv(descriptor, left)
        if not received:
            return False
        left = _behind(left, received)
    return True


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``parts`` behind their first ``count`` bytes."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else []
