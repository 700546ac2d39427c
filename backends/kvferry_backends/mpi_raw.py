"""Raw MPI, as the measure of what runs over it: ``python -m kvferry_backends.mpi_raw``.

It answers as ``kvferry_backends.nixl_raw`` does, by ``kvferry_native/raw/mpi``: two processes without Python, which are
stopped while they are not asked.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping

from kvferry_backends.mpi_agent import ON_LOOPBACK, SETTINGS
from kvferry_backends.mpi_launch import find_mpiexec, flags
from kvferry_backends.raw_tools import RawTool, find_tool, serve

WAYS: Mapping[str, str] = {"Put": "put", "Send/Recv": "send"}
"""Way → what the tool calls it."""

# Whoever waits gives its core away: with fewer cores than processes raw MPI would be a tenth as fast.
_SETTINGS = {**SETTINGS, **ON_LOOPBACK, "OMPI_MCA_osc": "rdma", "OMPI_MCA_mpi_yield_when_idle": "1"}

_END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


class _RawMpi(RawTool):
    """The tool's writer and its target, in one world."""

    def _end(self) -> None:
        mpiexec = self._child
        assert mpiexec.stdin is not None
        assert mpiexec.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError), mpiexec.stdin as stdin:
            stdin.write("end 0 0 0\n")
        try:
            mpiexec.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            mpiexec.terminate()  # its processes end with it
            mpiexec.wait()
        mpiexec.stdout.close()


def _end_with_parent() -> None:
    """A stopped orphan would stay for ever; mpiexec ends its processes when it is told to end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _start(nbytes: int) -> RawTool:
    path, environ = find_tool("raw MPI", "mpi")
    mpiexec = subprocess.Popen(
        [str(find_mpiexec()), *flags(), "-n", "2", path, str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environ, **_SETTINGS},
        text=True,
        preexec_fn=_end_with_parent,
    )
    return _RawMpi("raw MPI", WAYS, mpiexec)


def main() -> None:
    """Answer commands until the input ends."""
    serve("kvferry_backends.mpi_raw", "raw MPI", WAYS, _start)


if __name__ == "__main__":
    main()
