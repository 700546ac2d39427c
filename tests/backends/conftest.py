import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parent / "agent_child.py"


class AgentProcess:
    """``agent_child.py``, and what it said of itself."""

    def __init__(self, name: str, nbytes: int, environ: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), name, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environ},
            text=True,
        )
        self.nbytes = nbytes
        described = self._read(30)
        self.descriptor: str = described["descriptor"]
        self.address: int = described["address"]

    def _read(self, seconds: float) -> Any:
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(seconds), f"no answer within {seconds:g} s"
        line = self.process.stdout.readline()
        assert line, f"ended with status {self.process.wait(5)}"
        return json.loads(line)

    def tell(self, command: str, **arguments: Any) -> None:
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = 60) -> Any:
        return self._read(seconds)["answer"]

    def ask(self, command: str, **arguments: Any) -> Any:
        self.tell(command, **arguments)
        return self.answer()

    def write(self, target: "AgentProcess", peer: int, **how: Any) -> int:
        return self.ask("write", peer=peer, address=target.address, nbytes=target.nbytes, **how)

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


@pytest.fixture
def start(transports) -> Iterator[Callable[..., AgentProcess]]:
    with ExitStack() as stack:

        def starter(name: str, nbytes: int = 1 << 20) -> AgentProcess:
            process = AgentProcess(name, nbytes, transports)
            stack.callback(process.stop)
            return process

        yield starter
