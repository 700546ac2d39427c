import io
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parent / "agent_child.py"


class AgentProcess:
    """``agent_child.py`` or one of its kind, and what it said of itself."""

    def __init__(self, name: str, nbytes: int, environ: dict[str, str], script: Path = CHILD) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environ},
            text=True,
        )
        self.nbytes = nbytes

    @classmethod
    def of(cls, process: Any, nbytes: int) -> "AgentProcess":
        """One that was started by somebody else, with binary pipes."""
        made = cls.__new__(cls)
        process.stdin, process.stdout = io.TextIOWrapper(process.stdin), io.TextIOWrapper(process.stdout)
        made.process, made.nbytes = process, nbytes
        return made

    @cached_property
    def described(self) -> dict[str, Any]:
        """Waits until it is up: start several before asking the first."""
        return self._read(30)

    @property
    def descriptor(self) -> str:
        return self.described["descriptor"]

    @property
    def address(self) -> int:
        return self.described["address"]

    def _read(self, seconds: float) -> Any:
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(seconds), f"no answer within {seconds:g} s"
        line = self.process.stdout.readline()
        assert line, f"ended with status {self.process.wait(5)}"
        return json.loads(line)

    def tell(self, command: str, **arguments: Any) -> None:
        assert self.described
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 60) -> Any:
        return self._read(seconds)["answer"]

    def ask(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def write(self, target: "AgentProcess", peer: int, **how: Any) -> int:
        return self.ask("write", peer=peer, address=target.address, nbytes=target.nbytes, **how)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def until(self, command: str, expected: Any, *, seconds: float = 5, **arguments: Any) -> None:
        deadline = time.monotonic() + seconds
        while (answer := self.ask(command, **arguments)) != expected:
            assert time.monotonic() < deadline, f"{command} still says {answer!r} after {seconds:g} s"
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> int:
        """Close its input and return its exit status."""
        self.process.stdin.close()
        return self.process.wait(20)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


@pytest.fixture(params=[None, "tcp,self"], ids=["cma", "tcp"])
def transports(request) -> dict[str, str]:
    return {} if request.param is None else {"UCX_TLS": request.param}


@pytest.fixture(scope="session")
def adopt() -> Callable[[Any, int], AgentProcess]:
    """Drives a process that was started by somebody else."""
    return AgentProcess.of


@pytest.fixture
def script() -> Path:
    """What the agents' processes run."""
    return CHILD


@pytest.fixture
def start(transports, script) -> Iterator[Callable[..., AgentProcess]]:
    with ExitStack() as stack:

        def starter(name: str, nbytes: int = 1 << 20) -> AgentProcess:
            process = AgentProcess(name, nbytes, transports, script)
            stack.callback(process.stop)
            return process

        yield starter


@pytest.fixture
def pair(start) -> tuple[AgentProcess, AgentProcess]:
    """A writer and a target of 64 MiB that know each other; ``peer`` is what each calls the other."""
    writer, target = start("writer", 64 << 20), start("target", 64 << 20)
    writer.peer = writer.ask("connect", descriptor=target.descriptor)
    target.peer = target.ask("connect", descriptor=writer.descriptor)
    return writer, target
