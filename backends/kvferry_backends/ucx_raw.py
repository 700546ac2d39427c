"""Raw UCP puts, as the measure of what runs over UCX: ``python -m kvferry_backends.ucx_raw``.

It answers as ``kvferry_backends.nixl_raw`` does, by ``kvferry_native/raw/ucx``: two processes without Python, which are
stopped while they are not asked.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kvferry_plugins.errors import BackendUnavailableError, KvferryError, TransferError

WAYS: Mapping[str, str] = {"spinning target": "spin", "napping target": "nap"}
"""Way → what the tool calls it: whether the target makes progress without a pause, or once a millisecond."""


class _RawUcp:
    """The tool's writer and its target."""

    def __init__(self, nbytes: int) -> None:
        path, environ = _tool()
        self._writer = subprocess.Popen(
            [path, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "UCX_LOG_FILE": "stderr", **environ},
            text=True,
        )
        self._target = int(self._answer().removeprefix("ready "))
        self._signal(signal.SIGSTOP)

    def seconds(self, way: str, pieces: int, nbytes: int, seed: int) -> float:
        """Write so many equal pieces, in order (seed 0) or shuffled; both processes run only for so long."""
        assert self._writer.stdin is not None
        self._signal(signal.SIGCONT)
        self._writer.stdin.write(f"{WAYS[way]} {pieces} {nbytes} {seed}\n")
        self._writer.stdin.flush()
        seconds = float(self._answer())
        self._signal(signal.SIGSTOP)
        return seconds

    def _answer(self) -> str:
        assert self._writer.stdout is not None
        line = self._writer.stdout.readline()
        if not line:
            raise TransferError(f"raw UCP ended with status {self._writer.wait()}; its last words are above")
        return line

    def _signal(self, number: signal.Signals) -> None:
        for process in (self._writer.pid, self._target):
            os.kill(process, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.kill()  # its target dies with it
        self._writer.wait()


def _tool() -> tuple[str, Mapping[str, str]]:
    try:
        from kvferry_native.libraries import TransportUnavailableError, raw_tool
    except ImportError as error:
        raise BackendUnavailableError(
            f"raw UCP comes with kvferry-native ({error}); install it with: pip install 'kvferry[cpp]'"
        ) from error
    try:
        path, environ = raw_tool("ucx")
    except TransportUnavailableError as error:
        raise BackendUnavailableError(f"raw UCP: {error}") from error
    return str(path), environ


def _seconds(raw: _RawUcp, request: Mapping[str, Any], nbytes: int, block_bytes: int) -> float:
    way = request["way"]
    match request["command"]:
        case "write":
            return raw.seconds(way, 1, nbytes, 0)
        case "write_one_block":
            return raw.seconds(way, 1, block_bytes, 0)
        case "write_pieces":
            return raw.seconds(way, request["pieces"], nbytes, request.get("seed") or 0)
        case unknown:
            raise TransferError(f"raw UCP knows no command {unknown!r}")


def main() -> None:
    """Answer commands until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m kvferry_backends.ucx_raw", description=(__doc__ or "")[:62])
    parser.add_argument("--bytes", type=int, required=True, help="bytes of one contiguous write")
    parser.add_argument("--block-bytes", type=int, required=True, help="bytes of one block")
    options = parser.parse_args()
    try:
        _serve(options.bytes, options.block_bytes)
    except KvferryError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(1)


def _serve(nbytes: int, block_bytes: int) -> None:
    with _RawUcp(nbytes) as raw:
        print(json.dumps({"ways": list(WAYS)}), flush=True)
        for line in sys.stdin:
            seconds = _seconds(raw, json.loads(line), nbytes, block_bytes)
            print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
