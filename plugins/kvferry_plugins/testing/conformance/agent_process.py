"""Sides in processes of their own: what runs there, and how the suite's process calls them.

Run as ``python -m kvferry_plugins.testing.conformance.agent_process SOCKET FILE CLASS NAME``: loads the suite's class
from the file of its tests, makes its agent when asked to, and polls between calls as a worker's loop does.
"""

import contextlib
import faulthandler
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from kvferry_plugins.errors import KvferryError
from kvferry_plugins.testing.conformance.agent_side import AgentSide

START_SECONDS = 60.0
"""For a process to come up: it imports the tests, on a machine that may have other work."""

PAUSE_SECONDS = 2e-4
"""Between two polls of a side that nobody calls."""


_NEVER_BLOCK = frozenset(
    {"submit", "submit_strided", "submit_timed", "submit_blocks", "poll", "fence", "cancel", "progress_bytes"}
)


class ForeignError(Exception):
    """What an agent raised that is none of the contract's errors."""


class SideDied(AssertionError):
    """A side's process ended, or did not answer in time."""


Launcher = Callable[[Sequence[Sequence[str]]], Sequence[str]]
"""From the sides' command lines to the one that starts them all, as ``TransferBackend.launcher``."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a child finds the suite's class."""

    file: str
    qualname: str

    @classmethod
    def of(cls, suite: type) -> Self:
        """Say where a class is written."""
        module = sys.modules[suite.__module__]
        return cls(str(module.__file__), suite.__qualname__)

    def load(self) -> Any:
        """Import the file under a name of its own, and return the class."""
        spec = importlib.util.spec_from_file_location("kvferry_conformance_suite", self.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(Path(self.file).parent))
        spec.loader.exec_module(module)
        found: Any = module
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return found


class RemoteSide:
    """An ``AgentSide`` in another process: has its methods, each of which is answered or fails in bounded time."""

    def __init__(self, name: str, connection: Connection, pid: int, seconds: float) -> None:
        self.name = name
        self.pid = pid
        self._connection = connection
        self._seconds = seconds

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_") or not hasattr(AgentSide, method):
            raise AttributeError(method)
        return lambda *arguments, **named: self._call(method, *arguments, **named)

    def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        self.tell(method, *arguments, **named)
        return self.answer(method)

    def tell(self, method: str, *arguments: Any, **named: Any) -> None:
        """Call a method without waiting for its end."""
        try:
            self._connection.send((method, arguments, named))
        except OSError as error:
            raise SideDied(f"the process of {self.name} had ended before {method} was called") from error

    def answer(self, method: str, seconds: float | None = None) -> Any:
        """Wait for the end of what was told."""
        limit = seconds or self._seconds
        if not self._connection.poll(limit):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)  # says on its stderr where it hangs
                time.sleep(0.2)
            self.kill()
            hint = "it must not block" if method in _NEVER_BLOCK else "the agent hangs, or reports nothing"
            raise SideDied(f"{self.name}: {method} had not returned after {limit:g} s; {hint}")
        try:
            kind, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise SideDied(f"the process of {self.name} ended during {method}") from error
        if kind == "error":
            raise value
        return value

    def step(self) -> None:
        """Leave the side, which makes its own steps, some time."""
        time.sleep(PAUSE_SECONDS)

    def alive(self) -> bool:
        """Whether the process runs, or is stopped."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state != "Z"

    def send_signal(self, number: int) -> None:
        """Send its process a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a crash does, and see it end."""
        self.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + self._seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(1e-3)

    def leave(self) -> None:
        """Let it return from its main program, without any call of its agent."""
        self._connection.close()


class SideProcesses:
    """Processes of sides that are started together, and end with this object.

    Args:
        origin: the suite's class.
        names: one side each.
        environment: variables beside ours.
        launcher: one command for all, instead of one each.
        seconds: how long a call may take.
    """

    def __init__(
        self,
        origin: Origin,
        names: Sequence[str],
        *,
        environment: Mapping[str, str],
        launcher: Launcher | None = None,
        seconds: float = 20.0,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvferry-sides-"))
        self._seconds = seconds
        self._stdout = (self._folder / "stdout").open("wb")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "socket"))
        self._listener.listen(len(names))
        self._listener.settimeout(0.05)
        self.sides: dict[str, RemoteSide] = {}
        try:
            self._start(origin, names, environment, launcher)
            self._accept(len(names))
        except BaseException:
            self.close()
            raise

    def _start(
        self, origin: Origin, names: Sequence[str], environment: Mapping[str, str], launcher: Launcher | None
    ) -> None:
        module = [sys.executable, "-m", __spec__.name, str(self._folder / "socket"), origin.file, origin.qualname]
        commands: list[Sequence[str]] = [[*module, name] for name in names]
        path = os.pathsep.join(each for each in sys.path if each)
        # Torn apart from the caller's terminal: Ctrl-C is the suite's to handle.
        self._processes = [
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path, **environment},
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                start_new_session=True,
            )
            for command in (commands if launcher is None else [launcher(commands)])
        ]

    def _accept(self, count: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while len(self.sides) < count:
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                ended = [each.poll() for each in self._processes]
                if any(status is not None for status in ended) or time.monotonic() > deadline:
                    raise SideDied(f"the agents' processes did not come up; their exit statuses: {ended}") from None
                continue
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            name, pid = connection.recv()
            self.sides[name] = RemoteSide(name, connection, pid, self._seconds)

    def stdout(self) -> bytes:
        """What any of them has printed."""
        return (self._folder / "stdout").read_bytes()

    def close(self) -> list[int]:
        """End whatever still runs, and return the exit statuses of what we started."""
        for side in self.sides.values():
            side.leave()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
        for side in self.sides.values():
            if side.alive():
                side.kill()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._listener.close()
        self._stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return [process.returncode for process in self._processes]


# --- in the child -----------------------------------------------------------------------------------------------


def main() -> None:
    """Serve one side until the suite hangs up."""
    address, file, qualname, name = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)
    suite = Origin(file, qualname).load()()
    side = AgentSide(suite.make_agent, name)
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(address)
    with Connection(caller.detach()) as connection:
        connection.send((name, os.getpid()))
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            while True:
                if connection.poll(PAUSE_SECONDS):
                    _answer(connection, side)
                else:
                    side.step()


def _answer(connection: Connection, side: AgentSide) -> None:
    method, arguments, named = connection.recv()
    try:
        answer = ("value", getattr(side, method)(*arguments, **named))
    except Exception as error:
        answer = ("error", _portable(error))
    connection.send(answer)


def _portable(error: Exception) -> Exception:
    """Something that the suite's process can unpickle without importing the transport."""
    if isinstance(error, KvferryError):
        ours = next(kind for kind in type(error).__mro__ if kind.__module__ == KvferryError.__module__)
        return error if ours is type(error) else ours(str(error))
    if isinstance(error, AssertionError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    return ForeignError(f"{type(error).__module__}.{type(error).__name__}: {error} ({last.filename}:{last.lineno})")


if __name__ == "__main__":
    # By its real name: what it raises is unpickled by a process that knows no ``__main__`` of this kind.
    from kvferry_plugins.testing.conformance.agent_process import main as main_of_the_module

    main_of_the_module()
