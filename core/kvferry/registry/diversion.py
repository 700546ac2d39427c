"""Keeps what plugins print out of a command's answer: on to stderr, its beginning only, and counted."""

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

PASSED_CHARACTERS: Final = 2000
"""What of each plugin's output an operator sees."""
KEPT_BYTES: Final = 16 << 20
"""What may be written to descriptor 1 at once; more is an error for whoever writes."""


class _Counting:
    """A text stream that lets the beginning pass and counts; after the diversion it lets everything pass."""

    def __init__(self, stream: Any, diversion: "Diversion") -> None:
        self._stream = stream
        self._diversion = diversion

    def write(self, text: str) -> int:
        self._stream.write(self._diversion.admit(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Diversion:
    """While ``open``: ``sys.stdout``, ``sys.stderr`` and descriptor 1 lead to stderr. Single-threaded use only.

    What native code or another process writes to descriptor 2 goes where it goes.
    """

    def __init__(self) -> None:
        self._counted = 0
        self._file = -1
        self._is_open = False
        self._stderr: Any = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Divert; ``take`` says what was printed since."""
        before = sys.stdout, sys.stderr
        self._stderr = sys.stderr
        self._is_open = True
        sys.stdout, sys.stderr = self._streams()
        try:
            with self._descriptor():
                yield
        finally:
            self._is_open = False
            sys.stdout, sys.stderr = before

    def put_streams_back(self) -> bool:
        """Tell whether somebody has put another ``sys.stdout`` or ``sys.stderr`` in place, and put ours back."""
        replaced = self._is_open and not all(isinstance(each, _Counting) for each in (sys.stdout, sys.stderr))
        if replaced:
            sys.stdout, sys.stderr = self._streams()
        return replaced

    def _streams(self) -> "tuple[Any, Any]":
        return _Counting(self._stderr, self), _Counting(self._stderr, self)

    def admit(self, text: str) -> str:
        """Count a text and return what of it is shown."""
        if not self._is_open:
            return text
        room = max(PASSED_CHARACTERS - self._counted, 0)
        self._counted += len(text)
        return text[:room]

    @property
    def has_output(self) -> bool:
        """Whether something was printed since ``take``."""
        return self._counted > 0 or (self._file >= 0 and os.lseek(self._file, 0, os.SEEK_CUR) > 0)

    def take(self) -> int:
        """How much was printed since the last call; shows the beginning of what went to descriptor 1."""
        written = os.lseek(self._file, 0, os.SEEK_CUR) if self._file >= 0 else 0
        if written:
            shown = os.pread(self._file, max(PASSED_CHARACTERS - self._counted, 0), 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            with contextlib.suppress(OSError):
                os.write(2, shown)
        counted, self._counted = self._counted + written, 0
        return counted

    @contextmanager
    def _descriptor(self) -> Iterator[None]:
        with contextlib.suppress(OSError, ValueError):  # a stdout that was closed
            if sys.__stdout__ is not None:
                sys.__stdout__.flush()
        try:
            saved = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError:  # there is no descriptor 1
            yield
            return
        self._file = _bounded_file()
        os.dup2(self._file, 1)
        try:
            yield
        finally:
            self.take()
            os.dup2(saved, 1)
            os.close(saved)
            os.close(self._file)
            self._file = -1


def _bounded_file() -> int:
    file = os.memfd_create("kvferry-plugin-output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, KEPT_BYTES)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file
