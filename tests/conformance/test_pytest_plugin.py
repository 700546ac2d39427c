import json
import subprocess
import sys

from conformance.planted import run_suites

OWN_TESTS = """
import threading
import types

import numpy as np
import pytest

from kvferry_plugins import hookimpl
from kvferry_plugins.testing.conformance import ModelPluginConformance
from kvferry_plugins.testing.faults import FailPost
from kvferry_plugins.transceiver import Region


def post(writer, target):
    memory = np.zeros(64, dtype=np.uint8)
    for agent in (writer, target):
        agent.register([Region(memory.ctypes.data, memory.nbytes)])
    column = np.array([memory.ctypes.data], dtype=np.int64)
    writer.submit(writer.connect(target.local_descriptor()), column, column, np.array([64]))


@pytest.mark.kvferry_faults(FailPost())
def test_a_fault_by_marker(kvferry_agents):
    with pytest.raises(Exception, match="writer: the script refuses this post"):
        post(*kvferry_agents("writer", "target"))


def test_no_fault(kvferry_no_leaks, kvferry_agents):
    post(*kvferry_agents("writer", "target"))


def test_a_hold_that_leaks(kvferry_manager):
    kvferry_manager.allocate(1, 4)
    kvferry_manager.hold(kvferry_manager.block_table(1))


def test_a_thread_that_leaks(monkeypatch, kvferry_no_leaks):
    monkeypatch.setattr("kvferry_plugins.testing.pytest_plugin.LEAK_SECONDS", 0.1)
    threading.Thread(target=threading.Event().wait, name="left-alone", daemon=True).start()


class TestSilent(ModelPluginConformance):
    plugin = types.ModuleType("silent")
    silent = ("SilentForCausalLM",)
"""


def test_the_plugin_imports_nothing_heavy():
    code = "import json, sys, kvferry_plugins.testing.pytest_plugin; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"torch", "nixl", "numpy", "zmq", "kvferry"}.intersection(modules)
    assert not [name for name in modules if name.startswith("kvferry_plugins.testing.conformance")]


def test_its_fixtures_script_faults_and_find_leaks(tmp_path):
    (tmp_path / "test_own.py").write_text(OWN_TESTS)
    found = run_suites(tmp_path)["test_own"]
    assert (found["test_a_fault_by_marker"], found["test_no_fault"]) == (None, None)
    assert "blocks are still held at the end of the test, block: holds = {0: 1}" in found["test_a_hold_that_leaks"]
    assert "the test left behind: thread left-alone" in found["test_a_thread_that_leaks"]


def test_the_report_says_which_suites_ran_and_how_they_came_out(tmp_path):
    (tmp_path / "test_own.py").write_text(OWN_TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "TestSilent and hooks",
        "--strict-markers",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "= kvferry conformance =" in done.stdout
    assert "TestSilent (ModelPluginConformance): 1 failed" in done.stdout
