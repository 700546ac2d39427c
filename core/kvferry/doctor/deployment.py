"""What the checks know of a deployment and of this machine, so that they need to look at neither."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NETWORK_FOLDER = Path("/sys/class/net")
INFINIBAND_FOLDER = Path("/sys/class/infiniband")
GPU_FILE = Path("/dev/nvidia0")


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is to run; of a plan, where there is one."""

    backend: str | None = None
    """The plan's; None = nobody knows, so all count."""
    backend_source: str | None = None
    """``user``, ``environment``, …: see ``Decision.source``."""
    peers: tuple[str, ...] = ()
    """Configured endpoints, ``tcp://HOST:PORT``."""
    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto``."""

    def may_use(self, backend: str) -> bool:
        """Whether it runs on that backend, as far as one knows."""
        return self.backend in (None, backend)


@dataclass(frozen=True, slots=True)
class Machine:
    """What is here."""

    network_devices: frozenset[str] = frozenset()
    infiniband_devices: frozenset[str] = frozenset()
    has_gpu: bool = False
    nixl_plugins: frozenset[str] | None = None
    """Plugins in ``NIXL_PLUGIN_DIR``: ``UCX``, …; None = the variable is not set, or names no folder."""


def look_at_machine(environ: Mapping[str, str]) -> Machine:
    """Look at devices and folders; nothing is loaded."""
    return Machine(
        frozenset(_names(NETWORK_FOLDER)),
        frozenset(_names(INFINIBAND_FOLDER)),
        GPU_FILE.exists(),
        _nixl_plugins(environ.get("NIXL_PLUGIN_DIR")),
    )


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _nixl_plugins(folder: str | None) -> frozenset[str] | None:
    if folder is None or not Path(folder).is_dir():
        return None
    files = (name for name in _names(Path(folder)) if name.startswith("libplugin_") and ".so" in name)
    return frozenset(name.removeprefix("libplugin_").partition(".")[0] for name in files)
