"""What the raw tools without Python share: a child that writes when it is told, and the lines of JSON that drive it."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvferry_plugins.errors import BackendUnavailableError, KvferryError, TransferError

if TYPE_CHECKING:
    import subprocess


class RawTool:
    """A running tool, whose processes are stopped while it is not asked.

    Args:
        name: for messages: ``raw UCP``.
        ways: way → what the tool calls it.
        child: the tool, with pipes; first it says which processes it has.
        pids: more of its processes.
    """

    def __init__(
        self, name: str, ways: Mapping[str, str], child: "subprocess.Popen[str]", pids: Sequence[int] = ()
    ) -> None:
        self._name = name
        self._ways = ways
        self._child = child
        self._processes = [*pids, *(int(pid) for pid in self._answer().removeprefix("ready ").split())]
        self._signal(signal.SIGSTOP)

    def seconds(self, way: str, pieces: int, nbytes: int, seed: int) -> float:
        """Write so many equal pieces, in order (seed 0) or shuffled; the processes run only for so long."""
        assert self._child.stdin is not None
        self._signal(signal.SIGCONT)
        self._child.stdin.write(f"{self._ways[way]} {pieces} {nbytes} {seed}\n")
        self._child.stdin.flush()
        seconds = float(self._answer())
        self._signal(signal.SIGSTOP)
        return seconds

    def _answer(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise TransferError(f"{self._name} ended with status {self._child.wait()}; its last words are above")
        return line

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process, number)

    def _end(self) -> None:
        """End the tool and all of its processes."""
        self._child.kill()
        self._child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()


def find_tool(name: str, program: str) -> tuple[str, Mapping[str, str]]:
    """Return a tool of ``kvferry_native`` and its environment. Raises BackendUnavailableError."""
    try:
        from kvferry_native.libraries import TransportUnavailableError, raw_tool
    except ImportError as error:
        raise BackendUnavailableError(
            f"{name} comes with kvferry-native ({error}); install it with: pip install 'kvferry[cpp]'"
        ) from error
    try:
        path, environ = raw_tool(program)
    except TransportUnavailableError as error:
        raise BackendUnavailableError(f"{name}: {error}") from error
    return str(path), environ


def serve(
    module: str, name: str, ways: Mapping[str, str], start: Callable[[int], AbstractContextManager[RawTool]]
) -> None:
    """Answer commands until the input ends.

    Args:
        module: whose command line it is.
        name: of the tool, for messages.
        ways: as ``RawTool``.
        start: from the bytes of one contiguous write to the running tool.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"{name}, driven by lines of JSON")
    parser.add_argument("--bytes", type=int, required=True, help="bytes of one contiguous write")
    parser.add_argument("--block-bytes", type=int, required=True, help="bytes of one block")
    options = parser.parse_args()
    try:
        with start(options.bytes) as raw:
            print(json.dumps({"ways": list(ways)}), flush=True)
            for line in sys.stdin:
                seconds = _seconds(name, raw, json.loads(line), options.bytes, options.block_bytes)
                print(json.dumps({"seconds": seconds}), flush=True)
    except KvferryError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)


def _seconds(name: str, raw: RawTool, request: Mapping[str, Any], nbytes: int, block_bytes: int) -> float:
    way = request["way"]
    match request["command"]:
        case "write":
            return raw.seconds(way, 1, nbytes, 0)
        case "write_one_block":
            return raw.seconds(way, 1, block_bytes, 0)
        case "write_pieces":
            return raw.seconds(way, request["pieces"], nbytes, request.get("seed") or 0)
        case unknown:
            raise TransferError(f"{name} knows no command {unknown!r}")
