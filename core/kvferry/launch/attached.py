"""Stands between a launcher such as ``mpiexec`` and one worker.

    python -m kvferry.launch.attached SOCKET NUMBER COMMAND…

A launcher merges its processes' output and gives its input to the first alone. So whoever wants the workers listens on
a unix socket, and hands each of them its own standard streams there; it is told the worker's id, and how it ended.

    ← {"number": 1}
    →  the three descriptors, beside one byte
    ← {"pid": 4711}
    ← {"status": -9}

The worker's own end is not passed on as this process's status: a launcher ends all others when one fails, and whether
they shall go on is not the launcher's to say.
"""

import json
import os
import signal
import socket
import sys

from kvferry.launch.process import end_with_parent

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Take the streams, run the command on them, and tell its end."""
    path, number, *command = sys.argv[1:]
    _end_with(os.getppid())
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
        _tell(channel, number=int(number))
        _, streams, _, _ = socket.recv_fds(channel, 1, 3)
        if len(streams) != 3:
            raise SystemExit(f"{path} gave {len(streams)} streams, not 3")
        mine = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(command, streams, channel, mine)
        for stream in streams:
            os.close(stream)
        _tell(channel, pid=pid)
        _tell(channel, status=os.waitstatus_to_exitcode(_wait(pid)))


def _become(command: list[str], streams: list[int], channel: socket.socket, parent: int) -> None:
    """Turn into the worker; never returns."""
    try:
        _end_with(parent)
        channel.close()
        os.setpgid(0, 0)  # a signal to the launcher's whole group would come twice
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
    os._exit(127)


def _wait(pid: int) -> int:
    """Wait for the worker, which is told of the signals that are meant for it; a launcher's SIGKILL takes both."""
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _: os.kill(pid, received))
    return os.waitpid(pid, 0)[1]


def _tell(channel: socket.socket, **what: int) -> None:
    channel.sendall(json.dumps(what).encode() + b"\n")


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its parent, which may be gone by now."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(127)


if __name__ == "__main__":
    main()
