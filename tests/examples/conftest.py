import json
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from importlib_metadata import PackageNotFoundError, distribution
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "acme-kvferry"
TOY = ROOT / "examples" / "toytcp-kvferry"
OURS = Path(sysconfig.get_path("purelib"))


@dataclass(frozen=True)
class FreshEnvironment:
    """A virtual environment with kvferry's light dependencies, where nothing of this one is found."""

    folder: Path
    settings: dict[str, str]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(self, *command, cwd, **variables):
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=cwd,
            env={**self.settings, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def kvferry(self, *arguments, cwd, **variables):
        done = self.run("kvferry", *arguments, "--json", cwd=cwd, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def pip(self, *arguments):
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True)


def build_wheel(source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = target.glob("*.whl")
    return wheel


def closure(*names: str) -> set[str]:
    """All that these distributions need, without extras, among what is installed here."""
    wanted: set[str] = set()
    open_names = list(names)
    while open_names:
        name = re.sub(r"[-_.]+", "-", open_names.pop()).lower()
        if name in wanted:
            continue
        try:
            requires = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        wanted.add(name)
        open_names += [each.name for each in requires if each.marker is None or each.marker.evaluate({"extra": ""})]
    return wanted


def link(name: str, site: Path) -> None:
    """Make one distribution of this environment, and it alone, visible in another."""
    tops = {file.parts[0] for file in distribution(name).files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        if not (site / top).exists():
            (site / top).symlink_to(OURS / top)


@pytest.fixture(scope="module")
def fresh_environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    home = {"HOME": str(folder / "home"), "PATH": os.environ["PATH"], "COLUMNS": "200"}
    environment = FreshEnvironment(folder / "venv", home)
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    for name in closure("kvferry", "pytest") - {"kvferry"}:
        link(name, site)
    (folder / "wheels").mkdir()
    environment.pip("install", "--no-index", "--no-deps", str(build_wheel(ROOT, folder / "wheels" / "ours")))
    environment.pip("install", "--no-index", "--no-deps", str(build_wheel(EXAMPLE, folder / "wheels" / "acme")))
    return environment


@pytest.fixture(scope="module")
def with_toytcp(tmp_path_factory):
    """Runs a program of this environment where toytcp-kvferry is installed, too."""
    folder = tmp_path_factory.mktemp("toytcp")
    wheel = build_wheel(TOY, folder / "wheels")
    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, text=True)

    def run(*arguments, cwd=folder, **variables):
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(folder / "site"), "XDG_STATE_HOME": str(folder), **variables},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
