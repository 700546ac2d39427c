"""Runs suites in a pytest of their own, as their author would, and returns what failed."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree


def run_suites(
    folder: Path, *, names: Iterable[str] = (), variables: Mapping[str, str] | None = None
) -> dict[str, dict]:
    """Run the tests of a folder: class → test → None where it passed, else the failure's text."""
    report = folder / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--import-mode=importlib", "-o", "addopts="]
    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={folder}", f"--junitxml={report}", *names]
    environ = {**os.environ, "PYTHONPATH": str(folder), **(variables or {})}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert report.is_file(), done.stdout + done.stderr
    found: dict[str, dict] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [each for each in case if each.tag in ("failure", "error", "skipped")]
        why = "".join(each.get("message", "") + (each.text or "") for each in bad)
        tests = found.setdefault(case.get("classname", "").rpartition(".")[2], {})
        tests[case.get("name")] = "".join(filter(None, (tests.get(case.get("name")), why))) or None
    return found
