"""Writes files wholly or not at all, and one writer at a time."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

WAIT_SECONDS = 10.0
_STEP_SECONDS = 0.02


def replace_file(path: Path, data: bytes) -> None:
    """Put contents in the place of a file, or of what a link leads to; a failure leaves nothing beside it.

    Raises:
        OSError: it cannot be written there.
    """
    target = Path(os.path.realpath(path))
    mode = target.stat().st_mode & 0o777 if target.is_file() else 0o644
    with tempfile.NamedTemporaryFile("wb", dir=target.parent, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.chmod(file.name, mode)
            os.replace(file.name, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


@contextmanager
def one_writer(path: Path) -> Iterator[None]:
    """Keep other processes that ask for the same away from a file while it is read and written.

    Where its folder cannot be locked nobody is kept away: writing will say what is wrong there.

    Raises:
        TimeoutError: another one has had it for too long.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield
        return
    try:
        _lock(folder, path)
        yield
    finally:
        os.close(folder)


def _lock(folder: int, path: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has been writing {path} for {WAIT_SECONDS:g} s") from error
            time.sleep(_STEP_SECONDS)
        except OSError:  # such a file system
            return None
