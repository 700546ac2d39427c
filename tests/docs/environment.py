"""What a page's commands find: a folder, an environment of their own over ours, and free ports for those it names."""

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PORTS = re.compile(r"(?:(?:127\.0\.0\.1|localhost):|--(?:[a-z]+-)*port[ =])(\d{4,5})\b")
_SCRIPTS = {"kvferry": "kvferry.cli.main", "pip": "pip", "pytest": "pytest", "mkdocs": "mkdocs"}


def make_environment(folder: Path) -> dict[str, str]:
    """Make a virtual environment that finds all of ours, and where ``pip install .`` installs for this page alone."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(venv)], check=True)
    site = next((venv / "lib").glob("python*")) / "site-packages"
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    for script, module in _SCRIPTS.items():
        path = venv / "bin" / script
        path.write_text(f'#!/bin/sh\nexec {venv}/bin/python -m {module} "$@"\n')
        path.chmod(0o755)
    home = folder / "home"
    home.mkdir()
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    ours = Path(sys.executable).parent
    return {
        "PATH": f"{venv}/bin:{ours}:{os.environ['PATH']}",
        "HOME": str(home),
        "XDG_CACHE_HOME": cache,
        "SOURCE": str(ROOT),
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as --no-build-isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "NO_MKDOCS_2_WARNING": "1",
    }


def copy_examples(folder: Path) -> None:
    """Lay the examples where a page's commands look for them."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__", "build"))


def free_ports(text: str, taken: Mapping[str, str]) -> dict[str, str]:
    """A free port for each that the text names, below those which the kernel gives to clients."""
    ports = dict(taken)
    for named in dict.fromkeys(_PORTS.findall(text)):
        while named not in ports:
            candidate = str(random.SystemRandom().randrange(20_000, 30_000))
            if candidate not in ports.values() and _is_free(int(candidate)):
                ports[named] = candidate
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def replace_ports(text: str, ports: Mapping[str, str]) -> str:
    """Put other ports in the place of those that a text names."""
    return _PORTS.sub(lambda found: found[0].replace(found[1], ports.get(found[1], found[1])), text)
