"""Workers of a transport that has them in one world, started by one command, each with streams of its own."""

import contextlib
import json
import logging
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self, cast

from kvferry.launch.loopback import keep_to_loopback
from kvferry.launch.process import describe_status, end_with_parent
from kvferry.registry.door import Registry
from kvferry_plugins.errors import KvferryError

Launcher = Callable[[Sequence[Sequence[str]]], Sequence[str]]
"""From the workers' command lines to the one that starts them all."""

START_SECONDS = 60.0
STOP_SECONDS = 10.0
_LAST_BYTES = 2000
_log = logging.getLogger(__name__)


class LaunchError(KvferryError):
    """A launcher did not start its workers; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Order:
    """One worker that is to be started.

    Attributes:
        name: for messages, unique in its world: ``context worker``.
        command: its command line.
        stdin, stdout, stderr: ``subprocess.PIPE``, ``subprocess.DEVNULL``, or an open file.
    """

    name: str
    command: Sequence[str]
    stdin: int | IO[bytes] = subprocess.DEVNULL
    stdout: int | IO[bytes] = subprocess.PIPE
    stderr: int | IO[bytes] = subprocess.PIPE


class AttachedProcess:
    """One worker of a world. Like a ``subprocess.Popen``, of a process that is not our child."""

    def __init__(self, order: Order) -> None:
        self.name = order.name
        self.pid = 0
        self.returncode: int | None = None
        self._ended = threading.Event()
        self._signalling = threading.Lock()
        self._theirs: list[int] = []
        self.stdin = self._stream(order.stdin, 0)
        self.stdout = self._stream(order.stdout, 1)
        self.stderr = self._stream(order.stderr, 2)

    def _stream(self, wanted: int | IO[bytes], number: int) -> IO[bytes] | None:
        """Make one end for us and one for the worker, if a pipe is wanted; else for the worker alone."""
        if wanted == subprocess.PIPE:
            reading, writing = os.pipe()
            ours, theirs = (writing, reading) if number == 0 else (reading, writing)
            self._theirs.append(theirs)
            return cast("IO[bytes]", os.fdopen(ours, "wb" if number == 0 else "rb"))
        if wanted == subprocess.DEVNULL:
            self._theirs.append(os.open(os.devnull, os.O_RDWR))
        else:
            self._theirs.append(os.dup(wanted if isinstance(wanted, int) else wanted.fileno()))
        return None

    def take(self, channel: socket.socket) -> None:
        """Hand the worker its streams, and keep only our own ends. Raises OSError."""
        socket.send_fds(channel, [b"\0"], self._theirs)
        self.drop_theirs()

    def drop_theirs(self) -> None:
        """Close the worker's ends."""
        while self._theirs:
            os.close(self._theirs.pop())

    def drop_ours(self) -> None:
        """Close our own ends, where nobody has."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def end(self, status: int) -> None:
        """Take note of its end."""
        with self._signalling:
            self.returncode = status
        self._ended.set()

    def poll(self) -> int | None:
        """Its status, if it has ended: below 0, the signal that ended it."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its status. Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        with self._signalling:
            if self.returncode is None and self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, sig)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


class World:
    """Workers that were started together; a context manager that ends whoever is left.

    Until all of them are said to be ``ready``, one that ends takes the others with it: they would wait for it. Later
    the others go on, if their transport can.

    Args:
        launcher: makes the one command line.
        orders: the workers, by rank.
        environ: of the launcher and thereby of all workers; None = ours.

    Raises:
        LaunchError: not all of them were started in time.
    """

    def __init__(self, launcher: Launcher, orders: Sequence[Order], environ: Mapping[str, str] | None = None) -> None:
        self.processes: list[AttachedProcess] = []
        self._not_ready = {order.name for order in orders}
        self._all_here = False
        self._stopping = False
        self.first_to_end: AttachedProcess | None = None
        """Whoever ended first, other than by our own doing: the others may have ended for that reason."""
        self._readers: list[threading.Thread] = []
        with contextlib.ExitStack() as stack:
            self._errors: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-world-")))
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(str(folder / "socket"))
            self._listener.listen(len(orders))
            self.processes.extend(AttachedProcess(order) for order in orders)
            for process in self.processes:
                stack.callback(process.drop_ours)
                stack.callback(process.drop_theirs)
            command = launcher([_attached(folder / "socket", rank, order) for rank, order in enumerate(orders)])
            self._launcher = self._start(command, environ)
            stack.callback(self._stop)
            self._await_all(time.monotonic() + START_SECONDS)
            self._keep_to_loopback()
            self._resources = stack.pop_all()

    def _start(self, command: Sequence[str], environ: Mapping[str, str] | None) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=dict(environ) if environ is not None else None,
                start_new_session=True,  # Ctrl-C is ours to pass on
                preexec_fn=end_with_parent,  # the launcher, and it the workers
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started: {error}") from error

    def _await_all(self, deadline: float) -> None:
        """Give every worker its streams, and hear each one's process id."""
        waiting = {process.name for process in self.processes}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while waiting:
                if selector.select(0.1):
                    waiting.discard(self._greet(self._listener.accept()[0]).name)
                elif self._launcher.poll() is not None:
                    raise LaunchError(f"the launcher ended with status {self._launcher.returncode}: {self.last_words}")
                elif time.monotonic() > deadline:
                    raise LaunchError(f"{', '.join(sorted(waiting))} did not start: {self.last_words}")
        self._all_here = True
        if self.first_to_end is not None:
            self._launcher.terminate()

    def _keep_to_loopback(self) -> None:
        """All workers are on this host, so that nobody else needs the launcher; ``mpiexec`` listens on every device."""
        try:
            keep_to_loopback(self._launcher.pid)
        except OSError as error:
            if self._launcher.poll() is None:
                _log.warning("the launcher (%d) may listen beyond loopback: %s", self._launcher.pid, error)

    @property
    def launcher_pid(self) -> int:
        """The launcher's process id."""
        return self._launcher.pid

    def _greet(self, channel: socket.socket) -> AttachedProcess:
        lines = channel.makefile("rb")
        process = self.processes[int(json.loads(lines.readline())["number"])]
        process.take(channel)
        process.pid = int(json.loads(lines.readline() or b"{}").get("pid", 0))
        reader = threading.Thread(
            target=self._hear_end, args=(process, channel, lines), daemon=True, name=f"end-of-{process.name}"
        )
        reader.start()
        self._readers.append(reader)
        return process

    def _hear_end(self, process: AttachedProcess, channel: socket.socket, lines: IO[bytes]) -> None:
        with channel, lines, contextlib.suppress(OSError):
            line = lines.readline()
        # No word of its end: the launcher killed the one who would have told us.
        status = int(json.loads(line)["status"]) if line else -signal.SIGKILL
        if not self._stopping:
            self.first_to_end = self.first_to_end or process
        process.end(status)
        if self._stopping:
            return
        if self._not_ready:
            _log.warning("%s (%d) ended with %s; ending the others, which wait for it", *_end_of(process))
            if self._all_here:
                self._launcher.terminate()
        elif status != 0:
            _log.warning("%s (%d) ended with %s; nobody can take its place in this world", *_end_of(process))

    def ready(self, process: AttachedProcess) -> None:
        """Say that a worker is at work. Once all are, an end is its own."""
        self._not_ready.discard(process.name)

    @property
    def last_words(self) -> str:
        """The end of what the launcher said."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _LAST_BYTES))
        return self._errors.read().decode("utf-8", "replace").strip() or "(the launcher said nothing)"

    def close(self) -> None:
        """End whoever is left; idempotent."""
        self._resources.close()

    def _stop(self) -> None:
        """End the workers that are left by their ids, then the launcher, which cleans up behind them."""
        self._stopping = True
        for process in self.processes:
            process.kill()
        try:
            self._launcher.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        for reader in self._readers:
            reader.join(STOP_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def launcher_of(backend: str, registry: Registry) -> Launcher | None:
    """Import what starts a backend's workers together; None where each starts on its own, or nobody declares it."""
    declared = {answer.value.name: answer.value.launcher for answer in registry.transfer_backends()}
    path = declared.get(backend)
    return cast("Launcher", pkgutil.resolve_name(path)) if path else None


def _attached(path: Path, rank: int, order: Order) -> list[str]:
    return [sys.executable, "-m", "kvferry.launch.attached", str(path), str(rank), *order.command]


def _end_of(process: AttachedProcess) -> tuple[str, int, str]:
    return process.name, process.pid, describe_status(process.returncode or 0)
