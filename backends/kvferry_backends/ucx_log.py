"""What UCX says while a probe starts it: its warnings name the variables and devices that it could not use."""

import ctypes
import os
import re
from collections.abc import Callable

from kvferry_plugins.types import ProbeProblem

_COMPLAINT = re.compile(r"\bUCX\s+(?:WARN|ERROR)\s+(?P<text>.*)")
_HOW_TO_SILENCE = "UCX_WARN_UNUSED_ENV_VARS"
_BYTES = 1 << 16


def listen_to_ucx() -> Callable[[], list[ProbeProblem]]:
    """Have UCX log to memory. Call before UCX is loaded, in a process that is nobody else's.

    Returns:
        A function that reads what UCX has complained about so far, each complaint once.
    """
    memory = os.memfd_create("kvferry-ucx-log")
    os.environ |= {"UCX_LOG_FILE": f"/proc/self/fd/{memory}", "UCX_LOG_LEVEL": "warn"}
    return lambda: _complaints(memory)


def _complaints(memory: int) -> list[ProbeProblem]:
    ctypes.CDLL(None).fflush(None)  # UCX writes through a buffer of the C library
    lines = os.pread(memory, _BYTES, 0).decode(errors="replace").splitlines()
    found = (_COMPLAINT.search(line) for line in lines)
    texts = dict.fromkeys(match["text"].strip() for match in found if match)
    return [ProbeProblem(what=f"UCX says: {text}", fix="") for text in texts if _HOW_TO_SILENCE not in text]
