"""A child process that is driven by lines of JSON: one command in, one answer out, each within a deadline."""

import contextlib
import functools
import json
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from kvferry.launch.process import Process
from kvferry.launch.together import Launcher, Order, World
from kvferry_plugins.errors import KvferryError


class ChildError(KvferryError):
    """A child process answered with an error, not in time, or not at all."""


@dataclass(frozen=True, slots=True)
class ChildOrder:
    """A child that is to be started with others: ``python -m MODULE ARGUMENTS``, and its name for messages."""

    module: str
    arguments: Sequence[str]
    name: str

    @property
    def command(self) -> list[str]:
        """Its command line."""
        return [sys.executable, "-m", self.module, *self.arguments]


class Child:
    """A running ``python -m MODULE`` that reads commands and writes answers.

    Args:
        module: what to run.
        arguments: its command line.
        environ: its environment; None = ours.
        name: for messages.
        started: the process, if it runs already, what it writes its errors to, and what hears of its first answer.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        environ: Mapping[str, str] | None = None,
        name: str | None = None,
        started: tuple[Process, IO[bytes], Callable[[], None]] | None = None,
    ) -> None:
        order = ChildOrder(module, arguments, name or module)
        self.name = order.name
        self.process, self._errors, self._on_first_answer = started or _start_alone(order, environ)
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
            raise ChildError(self.describe_end())
        self._on_first_answer()
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer

    def describe_end(self) -> str:
        """How it ended, and the end of what it complained of."""
        return f"{self.name} ended with status {self.process.returncode}: {self._last_words()}"

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


def _start_alone(order: ChildOrder, environ: Mapping[str, str] | None) -> tuple[Process, IO[bytes], Callable[[], None]]:
    errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- lives as long as the child
    pipe = subprocess.PIPE
    whole = dict(environ) if environ is not None else None
    return subprocess.Popen(order.command, stdin=pipe, stdout=pipe, stderr=errors, env=whole), errors, lambda: None


@contextlib.contextmanager
def start_together(
    launcher: Launcher | None, orders: Sequence[ChildOrder], *, environ: Mapping[str, str] | None = None
) -> Iterator[list[Child]]:
    """Start children, side by side, and end them: as one world by a backend's launcher, or else each on its own.

    Args:
        launcher: as ``launcher_of`` gives it; None = each on its own.
        orders: the children, in the order of their ranks.
        environ: of all of them; None = ours.

    Raises:
        LaunchError: the launcher did not start them.
    """
    with contextlib.ExitStack() as stack:
        if launcher is None:
            yield [
                stack.enter_context(Child(order.module, order.arguments, environ=environ, name=order.name))
                for order in orders
            ]
            return
        errors: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in orders]
        pipes = [
            Order(order.name, order.command, stdin=subprocess.PIPE, stderr=file)
            for order, file in zip(orders, errors, strict=True)
        ]
        world = stack.enter_context(World(launcher, pipes, environ))
        children = []
        for order, process, file in zip(orders, world.processes, errors, strict=True):
            started = (process, file, functools.partial(world.ready, process))
            children.append(Child(order.module, order.arguments, name=order.name, started=started))
            stack.callback(children[-1].close)
        stack.callback(_hang_up, children)
        with _blaming(world, children):
            yield children


@contextlib.contextmanager
def _blaming(world: World, children: Sequence[Child]) -> Iterator[None]:
    """Name whoever ended first, if that is why another one ended."""
    try:
        yield
    except ChildError as error:
        culprit = next((child for child in children if child.process is world.first_to_end), None)
        if culprit is None or culprit.name in str(error):
            raise
        raise ChildError(f"{error}; first {culprit.describe_end()}") from error


def _hang_up(children: Sequence[Child]) -> None:
    """Close every child's input: those of one world leave it together, and wait for each other."""
    for child in children:
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.close()
