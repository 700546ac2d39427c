"""Small distributions, built by hand and installed by pip as anybody's are."""

import subprocess
import sys
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

PLUGIN = """
from kvferry_plugins import hookimpl

@hookimpl
def preferred_transceiver_runtime(architecture):
    return {answer!r} if architecture == "AcmeForCausalLM" else None
"""


def plugin_source(answer: str = "PYTHON") -> str:
    """A module that is a model plugin."""
    return PLUGIN.format(answer=answer)


def write_wheel(
    folder: Path, name: str, version: str, points: dict[str, str], files: dict[str, str], commands: str = ""
) -> Path:
    """Write a wheel of Python files with entry points."""
    package = name.replace("-", "_")
    metadata = f"{package}-{version}.dist-info"
    listed = "".join(f"{point} = {value}\n" for point, value in points.items())
    members = {
        **files,
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{metadata}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{metadata}/entry_points.txt": f"[kvferry]\n{listed}{commands}",
    }
    record = "".join(f"{member},sha256={_digest(text)},{len(text.encode())}\n" for member, text in members.items())
    path = folder / f"{package}-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in {**members, f"{metadata}/RECORD": f"{record}{metadata}/RECORD,,\n"}.items():
            wheel.writestr(member, text)
    return path


def write_project(folder: Path, name: str, version: str, point: str, source: str) -> Path:
    """Write the sources of a distribution with one plugin, to be installed editable."""
    package = name.replace("-", "_")
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text(source)
    (folder / "pyproject.toml").write_text(
        f"""
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "{name}"
version = "{version}"
[project.entry-points.kvferry]
{point} = "{package}"
"""
    )
    return folder


def pip_install(target: Path, *wheels: Path, editable: Path | None = None) -> Path:
    """Install into a folder of its own, from what is given alone."""
    what = [*(str(wheel) for wheel in wheels), *(["--no-build-isolation", "-e", str(editable)] if editable else [])]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*command, "--no-deps", "--target", str(target), *what], check=True, capture_output=True, text=True)
    return target


def _digest(text: str) -> str:
    return urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b"=").decode()
