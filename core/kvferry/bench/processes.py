"""A child process that is driven by lines of JSON: one command in, one answer out, each within a deadline."""

import contextlib
import json
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

from kvferry_plugins.errors import KvferryError


class ChildError(KvferryError):
    """A child process answered with an error, not in time, or not at all."""


class Child:
    """A running ``python -m MODULE`` that reads commands and writes answers.

    Args:
        module: what to run.
        arguments: its command line.
        environ: its environment; None = ours.
        name: for messages.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        environ: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or module
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the child
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environ) if environ is not None else None,
        )
        self._selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def ask(self, command: str, *, timeout: float = 60.0, **arguments: object) -> Any:
        """Send one command and wait for its answer.

        Raises:
            ChildError: the child said an error, died (with the end of its stderr), or did not answer in time.
        """
        self.tell(command, **arguments)
        return self.answer(timeout=timeout)

    def tell(self, command: str, **arguments: object) -> None:
        """Send one command; its answer is still to be read."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise ChildError(f"{self.name} is gone: {self._last_words()}") from error

    def answer(self, *, timeout: float = 60.0) -> Any:
        """Wait for the next answer; raises ChildError like ``ask``."""
        assert self.process.stdout is not None
        if not self._selector.select(timeout):
            raise ChildError(f"{self.name} did not answer within {timeout:g} s: {self._last_words()}")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(5)
            raise ChildError(f"{self.name} ended with status {self.process.returncode}: {self._last_words()}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode("utf-8", "replace").strip() or "(it said nothing)"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this child, by its id."""
        self.process.send_signal(number)

    def close(self) -> None:
        """End the child: by closing its input, by SIGKILL if that does not help."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.poll() is None:
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._selector.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
