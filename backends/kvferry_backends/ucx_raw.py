"""Raw UCP puts, as the measure of what runs over UCX: ``python -m kvferry_backends.ucx_raw``.

It answers as ``kvferry_backends.nixl_raw`` does, by ``kvferry_native/raw/ucx``: two processes without Python, which are
stopped while they are not asked.
"""

import os
import subprocess
from collections.abc import Mapping

from kvferry_backends.raw_tools import RawTool, find_tool, serve

WAYS: Mapping[str, str] = {"spinning target": "spin", "napping target": "nap"}
"""Way → what the tool calls it: whether the target makes progress without a pause, or once a millisecond."""


def _start(nbytes: int) -> RawTool:
    path, environ = find_tool("raw UCP", "ucx")
    writer = subprocess.Popen(
        [path, str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "UCX_LOG_FILE": "stderr", **environ},
        text=True,
    )
    return RawTool("raw UCP", WAYS, writer, [writer.pid])  # its target dies with it


def main() -> None:
    """Answer commands until the input ends."""
    serve("kvferry_backends.ucx_raw", "raw UCP", WAYS, _start)


if __name__ == "__main__":
    main()
