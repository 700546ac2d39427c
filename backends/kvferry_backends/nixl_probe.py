"""Tries NIXL as our agents use it: an agent on its UCX plugin."""

import os
import sys
from typing import Any

from kvferry_backends.nixl_library import TRANSPORT, library_version, make_agent
from kvferry_backends.probing import native_problems, not_installed
from kvferry_backends.ucx_log import listen_to_ucx
from kvferry_plugins.errors import BackendUnavailableError
from kvferry_plugins.types import ProbeProblem, ProbeReport

INSTALL = "pip install 'kvferry[nixl]'"
PLUGIN_FOLDER = "NIXL_PLUGIN_DIR"
_MEMORY = {"DRAM_SEG": "host", "VRAM_SEG": "cuda"}


def probe() -> ProbeReport:
    """Start an agent and report what it can use; called in a process of its own."""
    missing = not_installed(("nixl", "torch"), INSTALL)
    if missing is not None:
        return missing
    complaints = listen_to_ucx()
    try:
        agent = make_agent("kvferry-doctor", loopback_only=True)
    except BackendUnavailableError as error:
        problems = [_problem(str(error)), *complaints()]
        return ProbeReport(usable=False, library=library_version(), transports=[], problems=problems)
    return ProbeReport(
        usable=True,
        library=f"{library_version()} ({_wheel()})",
        transports=[str(name) for name in agent.backends],
        memory=_memory(agent),
        problems=[*native_problems("nixl"), *complaints()],
    )


def _problem(message: str) -> ProbeProblem:
    what, _, fix = message.partition("; ")
    if PLUGIN_FOLDER in os.environ and "No plugins" in what:
        fix = f"{PLUGIN_FOLDER}={os.environ[PLUGIN_FOLDER]!r}: unset it, NIXL's wheel brings its plugins"
    return ProbeProblem(what=what, fix=fix)


def _wheel() -> str:
    """Name the one of the wheels that ``nixl`` has chosen: by torch's CUDA."""
    return next((name for name in ("nixl_cu12", "nixl_cu13") if name in sys.modules), "of its own")


def _memory(agent: Any) -> list[str]:
    kinds = agent.get_backend_mem_types(TRANSPORT)
    return [_MEMORY.get(kind, kind) for kind in kinds]
