import json
import subprocess
import sys

from kvferry_plugins.testing import FakeModelPlugin


def test_the_fixture_makes_isolated_registries(kvferry_registry):
    registry = kvferry_registry(FakeModelPlugin("A", runtime="CPP"))

    assert [answer.plugin for answer in registry.preferred_transceiver_runtime("A", None)] == ["fake-1"]


def test_the_pytest_plugin_imports_nothing_heavy():
    code = "import json, sys, kvferry.testing.pytest_plugin; print(json.dumps(sorted(sys.modules)))"

    modules = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)

    assert not {"torch", "nixl", "transformers", "numpy", "zmq", "rich"}.intersection(modules)
