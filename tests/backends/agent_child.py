"""An agent with one buffer in a process of its own, driven by lines of JSON; polls between commands. Here: NIXL's."""

import base64
import json
import mmap
import os
import select
import socket
import sys
import time
from pathlib import Path

import numpy as np

from kvferry_backends.nixl_agent import NixlAgent
from kvferry_backends.orphaned_bytes import orphaned_bytes
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.transceiver import Region
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec


class AgentChild:
    def __init__(self, name: str, nbytes: int) -> None:
        self.agent = self.make_agent(name)
        self.buffer = np.zeros(nbytes, dtype=np.uint8)
        self.registration = self.agent.register([Region(self.buffer.ctypes.data, nbytes)])
        self.polls = True
        self.completions: dict[int, dict] = {}

    def make_agent(self, name):
        return NixlAgent(AgentSpec("NIXL", name, "cpu", options={LOOPBACK_ONLY: True}))

    def poll(self) -> None:
        for completion in self.agent.poll():
            self.completions[completion.id] = {"ok": completion.ok, "error": completion.error}

    def describe(self):
        descriptor = base64.b64encode(self.agent.local_descriptor()).decode()
        return {"descriptor": descriptor, "address": self.buffer.ctypes.data, "pid": os.getpid()}

    def connect(self, descriptor):
        return self.agent.connect(base64.b64decode(descriptor))

    def disconnect(self, peer):
        self.agent.disconnect(peer)

    def set_polling(self, on):
        self.polls = on

    def fill(self, value=None, seed=None):
        self.buffer[:] = value if seed is None else _pattern(seed, len(self.buffer))

    def count(self, value=None, seed=None):
        """Bytes that are as ``fill`` with the same arguments would have made them."""
        expected = value if seed is None else _pattern(seed, len(self.buffer))
        return int(np.count_nonzero(self.buffer == expected))

    def write(self, peer, address, nbytes, pieces=1, seed=None):
        offsets = np.arange(pieces, dtype=np.int64) * (nbytes // pieces)
        if seed is not None:
            offsets = np.random.default_rng(seed).permutation(offsets)
        sizes = np.full(pieces, nbytes // pieces, dtype=np.int64)
        return self.agent.submit(peer, offsets + self.buffer.ctypes.data, offsets + address, sizes)

    def outcome(self, transfer, seconds=10.0):
        deadline = time.monotonic() + seconds
        while transfer not in self.completions and time.monotonic() < deadline:
            self.poll()
        return self.completions.get(transfer)

    def write_until_it_fails(self, peer, address, nbytes):
        """Keep two transfers going; returns how many succeeded and what ended it."""
        succeeded = 0
        transfers = []
        while True:
            try:
                transfers = [*transfers, self.write(peer, address, nbytes, pieces=256, seed=1)]
            except KvferryError as error:
                return {"succeeded": succeeded, "error": f"{type(error).__name__}: {error}"}
            if len(transfers) == 2:
                outcome = self.outcome(transfers.pop(0))
                if outcome is None or not outcome["ok"]:
                    return {"succeeded": succeeded, "error": outcome and outcome["error"]}
                succeeded += 1

    def watch(self, seconds):
        """Whether a byte changes while we go on polling."""
        before = self.buffer.copy()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
        return int(np.count_nonzero(before != self.buffer))

    def listening(self):
        """Local addresses, as in ``/proc/net/tcp``, where this process listens."""
        sockets = {
            os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and _is_open(fd)
        }
        rows = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()
        ]
        return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]

    def hold_unread_bytes(self):
        """Own a connection whose other end sent something and is closed, and never read it."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.unread = socket.create_connection(server.getsockname())
            with server.accept()[0] as connection:
                connection.send(b"never read")
        assert orphaned_bytes()

    def fence(self, peer):
        return self.agent.fence(peer).name

    def leaks(self):
        agent = self.agent
        return [len(agent._queue), len(agent._peers), len(agent._leaving)]

    def break_connections(self):
        """Shut down every TCP connection of this process, as a network that fails does."""
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    connection.getpeername()
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def write_rounds(self, peer, address, nbytes, rounds, board):
        """Write, and put up the round's number once the completion has come."""
        flags = _board(board)
        for number in range(1, rounds + 1):
            self.buffer[:nbytes] = number % 251
            while flags[0] < number:
                self.poll()
            transfer = self.write(peer, address, nbytes, pieces=16, seed=number)
            assert self.outcome(transfer)["ok"]
            flags[1] = number

    def check_rounds(self, nbytes, rounds, board):
        """Compare at once when the number goes up; returns in how many rounds a byte was wrong."""
        flags = _board(board)
        wrong = 0
        for number in range(1, rounds + 1):
            self.buffer[:nbytes] = 255
            flags[0] = number
            while flags[1] < number:
                self.poll()
            wrong += bool((self.buffer[:nbytes] != number % 251).any())
        return wrong

    def close(self):
        self.agent.deregister(self.registration)
        self.agent.close()
        self.agent.close()


def _is_open(fd):
    return Path(f"/proc/self/fd/{fd}").is_symlink()


def _pattern(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def _board(path):
    with open(path, "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 16), dtype=np.int64)


def main(kind=AgentChild) -> None:
    child = kind(sys.argv[1], int(sys.argv[2]))
    print(json.dumps(child.describe()), flush=True)
    while True:
        while child.polls and not select.select([0], [], [], 0.0001)[0]:
            child.poll()
        line = sys.stdin.readline()
        if not line:
            return
        command = json.loads(line)
        try:
            answer = getattr(child, command.pop("command"))(**command)
        except KvferryError as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    main()
