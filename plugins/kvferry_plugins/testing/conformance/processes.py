"""Runs a plugin in processes of their own: the probe of its import, and ``kvferry explain``."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG: Mapping[str, Any] = {"cache_transceiver_config": {"backend": "NIXL"}}
"""An engine configuration that leaves everything else open."""

Report = dict[str, dict[str, list[str]]]
"""Stage → aspect → what was found."""


def _environment() -> dict[str, str]:
    """This process's, with its path, so that a child finds what this one found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def probe(reference: str, asked: str, folder: Path, seconds: float) -> Report | str:
    """Import a plugin and ask its hooks in a process of its own, and report; a text where that did not end well."""
    module = "kvferry_plugins.testing.conformance.import_probe"
    command = [sys.executable, "-m", module, reference, asked, str(folder / "report.json")]
    with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
        try:
            done = subprocess.run(
                command, env=_environment(), stdout=output, stderr=errors, timeout=seconds, check=False
            )
            end = f"ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            end = f"did not end within {seconds:g} s"
    if not (folder / "report.json").is_file():
        said = (folder / "errors").read_text(errors="replace")[-2000:]
        return f"a process that imports {reference} and asks its hooks {end}: {said}"
    found: Report = json.loads((folder / "report.json").read_text())
    return found


def module_of(reference: str, folder: Path) -> str:
    """A module for ``-p``: the plugin's own, or one, written to the folder, that has the hooks of an instance."""
    module, _, attribute = reference.partition(":")
    if not attribute:
        return module
    (folder / "of_an_instance.py").write_text(
        f"import {module} as _module\n"
        f"_plugin = _module.{attribute}\n"
        "globals().update({name: getattr(_plugin, name) for name in dir(_plugin) if not name.startswith('_')})\n"
    )
    return "of_an_instance"


def explained(flag: str, config: Mapping[str, Any], folder: Path, seconds: float) -> dict[str, Any]:
    """Run ``kvferry explain`` with a plugin and a model's configuration, and return what it says."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "engine.yaml").write_text(json.dumps(CONFIG))
    environ = _environment()
    environ |= {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "STATE")}
    environ["PYTHONPATH"] = os.pathsep.join((str(folder), environ["PYTHONPATH"]))
    command = [sys.executable, "-m", "kvferry", "explain", "--config", "engine.yaml", "--model", str(folder)]
    done = subprocess.run(
        [*command, "-p", flag, "--json"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"kvferry explain -p {flag} ended with status {done.returncode}: {said}"
    document: dict[str, Any] = json.loads(done.stdout)
    return document
