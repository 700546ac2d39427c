"""Tries Mooncake as our agents use it: an engine over TCP that takes memory and answers a peer."""

import numpy as np

from kvferry_backends.mooncake_library import (
    INSTALL,
    SYSTEM_LIBRARIES,
    StartedEngine,
    library_version,
    load_mooncake,
    start_engine,
)
from kvferry_backends.probing import not_installed, unusable
from kvferry_plugins.errors import BackendUnavailableError
from kvferry_plugins.types import ProbeProblem, ProbeReport


def probe() -> ProbeReport:
    """Start an engine and report what it can use; called in a process of its own."""
    missing = not_installed(("mooncake",), INSTALL)
    if missing is not None:
        return missing
    try:
        module = load_mooncake()
        started = start_engine(device="cpu", loopback_only=True)
    except BackendUnavailableError as error:
        return unusable(str(error), _fix(error), library=library_version())
    problems = _problems(started)
    return ProbeReport(
        usable=not problems,
        library=library_version(),
        transports=["tcp"],
        memory=["host", "cuda"] if module.SUPPORT_CUDA else ["host"],
        problems=problems,
    )


def _fix(error: BackendUnavailableError) -> str:
    if isinstance(error.__cause__, ImportError):
        return SYSTEM_LIBRARIES if ".so" in str(error.__cause__) else INSTALL
    return str(error).rpartition("; ")[2]


def _problems(started: StartedEngine) -> list[ProbeProblem]:
    memory = np.zeros(4096, dtype=np.uint8)
    status = started.engine.register_memory(memory.ctypes.data, memory.nbytes)
    if status != 0:
        return [ProbeProblem(what=f"Mooncake registers no memory: status {status}", fix=f"install it again: {INSTALL}")]
    if started.engine.send_probe(started.segment) != 0:
        return [ProbeProblem(what=f"Mooncake does not answer at {started.segment}", fix="let loopback TCP through")]
    return []
