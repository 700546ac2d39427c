import json
import os
import select
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "agent_child.py"


class AgentProcess:
    """``agent_child.py``, and what it said of itself."""

    def __init__(self, transport, name, nbytes, options, environ):
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), transport, name, str(nbytes), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environ},
            text=True,
        )
        described = self._read(30)
        self.nbytes, self.descriptor, self.address = nbytes, described["descriptor"], described["address"]

    def _read(self, seconds):
        assert select.select([self.process.stdout], [], [], seconds)[0], f"no answer within {seconds:g} s"
        line = self.process.stdout.readline()
        assert line, f"ended with status {self.process.wait(5)}"
        return json.loads(line)

    def tell(self, command, **arguments):
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def ask(self, command, **arguments):
        self.tell(command, **arguments)
        answer = self._read(60)
        return answer.get("answer", answer.get("error"))

    def kill(self):
        self.process.kill()
        self.process.wait(60)  # this machine has stood still for longer than ten

    def end(self):
        """Close its input and return its exit status."""
        self.process.stdin.close()
        return self.process.wait(20)

    def stop(self):
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


WAYS = {
    "ucx": ("ucx", {}),
    "ucx-tcp": ("ucx", {"UCX_TLS": "tcp,self"}),
    "ucx-posix": ("ucx", {"UCX_MM_ERROR_HANDLING": "y", "UCX_TLS": "posix,self"}),
    "ucx-shared": ("ucx", {"AGENT_MEMORY": "shared"}),
    # Beside the system's libibverbs, NIXL's own InfiniBand module ends a process with a segmentation fault.
    "nixl": ("nixl", {"UCX_MODULES": "^ib"}),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def way(request):
    return request.param


@pytest.fixture
def start_agent():
    with ExitStack() as stack:

        def starter(transport, name, environ, nbytes=16 << 20, **options):
            process = AgentProcess(transport, name, nbytes, options, environ)
            stack.callback(process.stop)
            return process

        yield starter


@pytest.fixture
def start(way, start_agent):
    transport, environ = way

    def starter(name, nbytes=16 << 20, **options):
        process = start_agent(transport, name, environ, nbytes, **options)
        # NIXL has no descriptor to sleep on: as a target it moves only while it is told that somebody writes.
        process.ask("set_active", active=transport == "nixl")
        return process

    return starter


@pytest.fixture
def pair(start):
    writer, target = start("writer"), start("target")
    writer.peer = writer.ask("connect", descriptor=target.descriptor)
    target.peer = target.ask("connect", descriptor=writer.descriptor)
    return writer, target
