"""Runs a plugin in processes of their own: the probe of its import, and ``kvferry explain``."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROBE_SECONDS = 120
"""After so long an import hangs."""

CONFIG: Mapping[str, Any] = {"cache_transceiver_config": {"backend": "NIXL"}}
"""An engine configuration that leaves everything else open."""

Report = dict[str, dict[str, list[str]]]
"""Stage → aspect → what was found."""


@functools.cache
def _environment() -> dict[str, str]:
    """This process's, with its path, so that a child finds what this one found."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def probe(reference: str, asked: str, folder: Path) -> Report | str:
    """Import a plugin and ask its hooks in a process of its own, and report; a text where that did not end well."""
    module = "kvferry_plugins.testing.conformance.import_probe"
    command = [sys.executable, "-m", module, reference, asked, str(folder / "report.json")]
    with (folder / "output").open("w") as output, (folder / "errors").open("w") as errors:
        try:
            done = subprocess.run(
                command, env=_environment(), stdout=output, stderr=errors, timeout=PROBE_SECONDS, check=False
            )
            end = f"ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            end = f"did not end within {PROBE_SECONDS} s"
    if not (folder / "report.json").is_file():
        said = (folder / "errors").read_text(errors="replace")[-2000:]
        return f"a process that imports {reference} and asks its hooks {end}: {said}"
    found: Report = json.loads((folder / "report.json").read_text())
    return found


def explained(flag: str, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run ``kvferry explain`` with a plugin and a model's configuration, and return what it says."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "engine.yaml").write_text(json.dumps(CONFIG))
    settings = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CONFIG", "STATE")}
    command = [sys.executable, "-m", "kvferry", "explain", "--config", "engine.yaml", "--model", str(folder)]
    done = subprocess.run(
        [*command, "-p", flag, "--json"],
        cwd=folder,
        env=_environment() | settings,
        capture_output=True,
        text=True,
        timeout=PROBE_SECONDS,
    )
    assert done.returncode == 0, (
        f"kvferry explain -p {flag} ended with status {done.returncode}: {done.stdout}{done.stderr}"
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return said
