"""Raw MPI, as the measure of what runs over it: ``python -m kvferry_backends.mpi_raw``.

It answers as ``kvferry_backends.nixl_raw`` does, by ``kvferry_native/raw/mpi``: two processes without Python, which are
stopped while they are not asked.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kvferry_backends.mpi_agent import ON_LOOPBACK, SETTINGS
from kvferry_backends.mpi_launch import find_mpiexec, flags
from kvferry_plugins.errors import BackendUnavailableError, KvferryError, TransferError

WAYS: Mapping[str, str] = {"Put": "put", "Send/Recv": "send"}
"""Way → what the tool calls it."""

# Whoever waits gives its core away: with fewer cores than processes raw MPI would be a tenth as fast.
_SETTINGS = {**SETTINGS, **ON_LOOPBACK, "OMPI_MCA_osc": "rdma", "OMPI_MCA_mpi_yield_when_idle": "1"}

_END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class _RawMpi:
    """The tool's writer and its target."""

    def __init__(self, nbytes: int) -> None:
        path, environ = _tool()
        self._mpiexec = subprocess.Popen(
            [str(find_mpiexec()), *flags(), "-n", "2", path, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environ, **_SETTINGS},
            text=True,
            preexec_fn=_end_with_parent,
        )
        self._processes = [int(pid) for pid in self._answer().removeprefix("ready ").split()]
        self._signal(signal.SIGSTOP)

    def seconds(self, way: str, pieces: int, nbytes: int, seed: int) -> float:
        """Write so many equal pieces, in order (seed 0) or shuffled; both processes run only for so long."""
        assert self._mpiexec.stdin is not None
        self._signal(signal.SIGCONT)
        self._mpiexec.stdin.write(f"{WAYS[way]} {pieces} {nbytes} {seed}\n")
        self._mpiexec.stdin.flush()
        seconds = float(self._answer())
        self._signal(signal.SIGSTOP)
        return seconds

    def _answer(self) -> str:
        assert self._mpiexec.stdout is not None
        line = self._mpiexec.stdout.readline()
        if not line:
            raise TransferError(f"raw MPI ended with status {self._mpiexec.wait()}; its last words are above")
        return line

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            os.kill(process, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._mpiexec.stdin is not None
        assert self._mpiexec.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError), self._mpiexec.stdin as stdin:
            stdin.write("end 0 0 0\n")
        try:
            self._mpiexec.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._mpiexec.terminate()  # its processes end with it
            self._mpiexec.wait()
        self._mpiexec.stdout.close()


def _end_with_parent() -> None:
    """A stopped orphan would stay for ever; mpiexec ends its processes when it is told to end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _tool() -> tuple[str, Mapping[str, str]]:
    try:
        from kvferry_native.libraries import TransportUnavailableError, raw_tool
    except ImportError as error:
        raise BackendUnavailableError(
            f"raw MPI comes with kvferry-native ({error}); install it with: pip install 'kvferry[cpp]'"
        ) from error
    try:
        path, environ = raw_tool("mpi")
    except TransportUnavailableError as error:
        raise BackendUnavailableError(f"raw MPI: {error}") from error
    return str(path), environ


def _seconds(raw: _RawMpi, request: Mapping[str, Any], nbytes: int, block_bytes: int) -> float:
    way = request["way"]
    match request["command"]:
        case "write":
            return raw.seconds(way, 1, nbytes, 0)
        case "write_one_block":
            return raw.seconds(way, 1, block_bytes, 0)
        case "write_pieces":
            return raw.seconds(way, request["pieces"], nbytes, request.get("seed") or 0)
        case unknown:
            raise TransferError(f"raw MPI knows no command {unknown!r}")


def main() -> None:
    """Answer commands until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m kvferry_backends.mpi_raw", description=(__doc__ or "")[:61])
    parser.add_argument("--bytes", type=int, required=True, help="bytes of one contiguous write")
    parser.add_argument("--block-bytes", type=int, required=True, help="bytes of one block")
    options = parser.parse_args()
    try:
        _serve(options.bytes, options.block_bytes)
    except KvferryError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)


def _serve(nbytes: int, block_bytes: int) -> None:
    with _RawMpi(nbytes) as raw:
        print(json.dumps({"ways": list(WAYS)}), flush=True)
        for line in sys.stdin:
            seconds = _seconds(raw, json.loads(line), nbytes, block_bytes)
            print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
