"""Calls functions in processes of their own, so that whatever they do harms nothing here and ends in time."""

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

ANSWER_BYTES = 1 << 20
"""What an answer may hold at most."""
OUTPUT_BYTES = 4096
"""How much of the end of what a process prints is kept."""
OUTPUT_LINES = 20
LINE_CHARACTERS = 400
_CHUNK = 1 << 16
_CHUNKS_AFTER_END = 64
_GRACE_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Call:
    """A function and what it is called with, which both processes spell as JSON."""

    function: str
    """``module:function``."""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ended."""

    value: Any = None
    failure: str | None = None
    """What it did instead of answering: ``was killed by signal 11 (SIGSEGV)``; None = ``value`` is the answer."""
    output: tuple[str, ...] = ()
    """The last lines that it printed, on either stream."""
    seconds: float = 0.0


def call_isolated(
    calls: Sequence[Call],
    *,
    timeout: float,
    at_once: int = 2,
    on_end: Callable[[Call, Ending], None] = lambda call, ending: None,
) -> list[Ending]:
    """Make every call in a process of its own and return how each ended, in the order of the calls.

    A process that crashes, hangs or talks is an ``Ending`` like any other; whatever it started in its process group is
    killed with it.

    Args:
        calls: what to call.
        timeout: seconds that each may take.
        at_once: how many run at a time.
        on_end: told each end, as it comes.
    """
    waiting = list(enumerate(calls))[::-1]
    endings: dict[int, Ending] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as undo:
        running: dict[int, _Child] = {}
        undo.callback(_kill_all, running)
        while waiting or running:
            while waiting and len(running) < at_once:
                number, call = waiting.pop()
                running[number] = _Child(call, selector, timeout)
            _wait(selector, running.values())
            for number, child in [each for each in running.items() if each[1].has_ended()]:
                endings[number] = running.pop(number).end()
                on_end(child.call, endings[number])
    return [endings[number] for number in range(len(calls))]


def _kill_all(running: "dict[int, _Child]") -> None:
    for child in running.values():
        child.kill()


def _wait(selector: selectors.BaseSelector, children: Any) -> None:
    deadline = min(child.deadline for child in children)
    for key, _ in selector.select(max(deadline - time.monotonic(), 0)):
        key.data()


class _Child:
    """A process that answers on a pipe of its own: what native libraries print cannot get in between."""

    def __init__(self, call: Call, selector: selectors.BaseSelector, timeout: float) -> None:
        self.call = call
        self._selector = selector
        self._started = time.monotonic()
        self._timeout = timeout
        self.deadline = self._started + timeout
        self._answer = bytearray()
        self._output = bytearray()
        self._exited = False
        self._answer_pipe, answer_end = os.pipe()
        self._output_pipe, output_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                _command(call, answer_end, timeout),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                pass_fds=(answer_end,),
                start_new_session=True,
            )
        finally:
            os.close(answer_end)
            os.close(output_end)
        self._handle = os.pidfd_open(self._process.pid)
        for pipe, read in ((self._answer_pipe, self._read_answer), (self._output_pipe, self._read_output)):
            os.set_blocking(pipe, False)
            selector.register(pipe, selectors.EVENT_READ, partial(self._read_some, pipe, read))
        selector.register(self._handle, selectors.EVENT_READ, self._mark_exited)

    def has_ended(self) -> bool:
        """Whether it exited, ran out of time, or says too much."""
        return self._exited or time.monotonic() >= self.deadline or len(self._answer) > ANSWER_BYTES

    def end(self) -> Ending:
        """Kill what is left and say how it ended."""
        seconds = time.monotonic() - self._started
        self.kill()
        return replace(self._ending(), output=_lines(self._output), seconds=seconds)

    def kill(self) -> None:
        """Kill the process and all of its group; the process is not reaped before, so its number is still its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that sleeps in the kernel stays
            self._process.wait(_GRACE_SECONDS)
        for pipe, read in ((self._answer_pipe, self._read_answer), (self._output_pipe, self._read_output)):
            self._drain(pipe, read)
            self._forget(pipe)
        self._forget(self._handle)

    def _ending(self) -> Ending:
        if len(self._answer) > ANSWER_BYTES:
            return Ending(failure=f"answered more than {ANSWER_BYTES} bytes")
        is_whole = self._answer.endswith(b"\n")
        if not self._exited and not is_whole:
            return Ending(failure=f"did not end within {self._timeout:g} s")
        return _decode(bytes(self._answer)) if self._answer else Ending(failure=_exit(self._process.returncode))

    def _mark_exited(self) -> None:
        self._exited = True

    def _read_some(self, pipe: int, read: Callable[[bytes], None]) -> bool:
        """Read once; False where there is nothing left."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            read(data)
        elif pipe in self._selector.get_map():
            self._selector.unregister(pipe)
        return bool(data)

    def _read_answer(self, data: bytes) -> None:
        if len(self._answer) <= ANSWER_BYTES:
            self._answer += data

    def _read_output(self, data: bytes) -> None:
        self._output += data
        del self._output[:-OUTPUT_BYTES]

    def _drain(self, pipe: int, read: Callable[[bytes], None]) -> None:
        for _ in range(_CHUNKS_AFTER_END):  # somebody who left the group may write for ever
            if not self._read_some(pipe, read):
                return

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
        os.close(descriptor)


def _command(call: Call, answer_end: int, timeout: float) -> list[str]:
    # Killed by its own alarm where nobody is left to do it.
    alarm = math.ceil(timeout) + _GRACE_SECONDS
    child = "kvferry.registry.isolated_child"
    return [
        *(sys.executable, "-P", "-u", "-m", child),
        *(str(answer_end), str(alarm), call.function, json.dumps(call.arguments)),
    ]


def _environment() -> dict[str, str]:
    # Modules named by -p are found from the same places as here.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def _decode(answer: bytes) -> Ending:
    try:
        document = json.loads(answer)
        return Ending(failure=document["failure"]) if "failure" in document else Ending(document["value"])
    except (ValueError, KeyError, TypeError):
        return Ending(failure=f"wrote {answer[:80]!r} where its answer belongs")


def _exit(status: int) -> str:
    if status >= 0:
        return f"ended Python with {status}"
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"was killed by signal {-status}"


def _lines(output: bytearray) -> tuple[str, ...]:
    lines = output.decode(errors="replace").splitlines()
    return tuple(line[:LINE_CHARACTERS] for line in lines[-OUTPUT_LINES:] if line.strip())
