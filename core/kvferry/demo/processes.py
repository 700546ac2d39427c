"""Worker processes that the demo starts, watches, and ends by their id."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvferry.launch.process import Process, describe_status, end_with_parent
from kvferry.launch.together import Launcher, Order, World
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.types import Role

READY_SECONDS = 600.0
STOP_SECONDS = 5.0
LAST_LINES = 12
PROGRESS = "progress: "


class WorkerFailedError(KvferryError):
    """A worker process did not start, ended, or gave an answer that is none."""


@dataclass(eq=False)
class WorkerProcess:
    """One ``kvferry worker``; a context manager that starts it, unless that was done, and ends it."""

    name: str
    arguments: Sequence[str]
    on_progress: Callable[[str], None]
    http: str = ""
    metrics: str | None = None
    """Its metrics' own port, if it has one."""
    _process: Process | None = None
    _failure: WorkerFailedError | None = None
    _output: "queue.SimpleQueue[str | None]" = field(default_factory=queue.SimpleQueue)
    _last_lines: "deque[str]" = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    _readers: list[threading.Thread] = field(default_factory=list)
    _told_to_end: bool = False

    @property
    def command(self) -> list[str]:
        """Its command line."""
        return [sys.executable, "-m", "kvferry", "worker", *self.arguments, "--json"]

    def attach(self, process: Process) -> None:
        """Take a process that somebody else has started with ``command``, its output and errors piped."""
        self._process = process

    def __enter__(self) -> "WorkerProcess":
        self._process = self._process or subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to pass on
            preexec_fn=end_with_parent,
            env=worker_environ(),
        )
        self._read(self._process.stdout, self._output.put, lambda: self._output.put(None))
        self._read(self._process.stderr, self._hear, lambda: None)
        return self

    def __exit__(self, *exception: object) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            self.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join(STOP_SECONDS)

    def terminate(self) -> None:
        """Have it end, once, without waiting for that; so several can end at the same time."""
        if self._process is not None and not self._told_to_end:
            self._told_to_end = True  # a second signal would cut its clean-up short
            self._process.send_signal(signal.SIGTERM)

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait for its ready line. Raises WorkerFailedError, and the same again when asked again."""
        if self._failure is not None:
            raise self._failure
        try:
            self._wait_ready()
        except WorkerFailedError as error:
            self._failure = error
            raise

    def runs_as(self, process: Process | None) -> bool:
        """Whether this is that process."""
        return process is not None and self._process is process

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        lines: list[str] = []
        while True:
            try:
                line = self._output.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self.failure(f"was not ready after {READY_SECONDS:g} s") from None
            if line is None:
                raise self._ended("".join(lines))
            lines.append(line)
            with contextlib.suppress(ValueError):
                ready = json.loads(line)
                if isinstance(ready, dict) and ready.get("ready"):
                    self.http, self.metrics = ready["http"], ready.get("metrics")
                    return

    def failure(self, what: str) -> WorkerFailedError:
        """An error that quotes the worker's last lines."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that is ending has its status in a moment
            self._process.wait(0.5)
        status = self._process.poll()
        ended = f" (it ended with {describe_status(status)})" if status is not None else ""
        quoted = "".join(f"\n  | {line}" for line in self._last_lines) or " nothing"
        return WorkerFailedError(f"the {self.name} worker {what}{ended}; its last lines on stderr:{quoted}")

    def _ended(self, output: str) -> WorkerFailedError:
        """Its own words, if it left any: the JSON object of a command that failed."""
        try:
            messages = [error["message"] for error in json.loads(output)["errors"]]
        except (ValueError, KeyError, TypeError):
            messages = []
        if messages:
            return WorkerFailedError(f"the {self.name} worker cannot start: {' '.join(messages)}")
        return self.failure("did not start")

    def _hear(self, line: str) -> None:
        line = line.rstrip("\n")
        if line.startswith(PROGRESS):
            self.on_progress(f"{self.name} worker: {line.removeprefix(PROGRESS)}")
        else:
            self._last_lines.append(line)

    def _read(self, stream: "IO[bytes] | None", on_line: Callable[[str], None], at_end: Callable[[], None]) -> None:
        def read() -> None:
            assert stream is not None
            with stream:
                for line in stream:
                    on_line(line.decode("utf-8", "replace"))
            at_end()

        reader = threading.Thread(target=read, daemon=True, name=f"{self.name}-output")
        reader.start()
        self._readers.append(reader)


def worker_environ() -> dict[str, str]:
    """The environment of a worker."""
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def worker_arguments(
    role: Role,
    *,
    folder: Path,
    config: Path,
    prefill_chunk: int,
    plugin_arguments: Sequence[str],
    trace: Path | None = None,
) -> Sequence[str]:
    """The arguments of a worker that serves nobody else."""
    return (
        *("--role", role.value),
        *("--model", str(folder)),
        *("--config", str(config)),
        *("--prefill-chunk", str(prefill_chunk)),
        *("--drain-seconds", "0"),
        *(("--trace", str(trace)) if trace is not None else ()),
        *plugin_arguments,
    )


@contextlib.contextmanager
def started(workers: Sequence[WorkerProcess], launcher: Launcher | None) -> Iterator[Callable[[], None]]:
    """Start workers, as one world by a backend's launcher, or else each on its own; end them at the same time.

    Yields:
        What waits until all of them are ready; raises WorkerFailedError for the one that failed.

    Raises:
        LaunchError: the launcher did not start them.
    """
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(_world(workers, launcher)) if launcher is not None else None
        for worker in workers:
            stack.enter_context(worker)
        for worker in workers:
            stack.callback(worker.terminate)
        yield lambda: _wait_ready(workers, world)


def _world(workers: Sequence[WorkerProcess], launcher: Launcher) -> World:
    world = World(launcher, [Order(worker.name, worker.command) for worker in workers], worker_environ())
    for worker, process in zip(workers, world.processes, strict=True):
        worker.attach(process)
    return world


def _wait_ready(workers: Sequence[WorkerProcess], world: World | None) -> None:
    try:
        for worker in workers:
            worker.wait_ready()
    except WorkerFailedError:
        for worker in workers:
            # The others waited for this one, and ended with it.
            if world is not None and worker.runs_as(world.first_to_end):
                worker.wait_ready()
        raise
    if world is not None:
        for process in world.processes:
            world.ready(process)
