"""Plugins that would end the command, or keep it from ending, met by the real command."""

import json
import os
import subprocess
import sys

import pytest

HOOK = """
from kvferry_plugins import hookimpl

@hookimpl
def preferred_transceiver_runtime(architecture):
    {body}
"""
PLUGINS = {
    "ends_python": "import os\ntry:\n    os._exit(0)\nexcept Exception:\n    pass\n",
    "lingers": "import atexit, time\natexit.register(time.sleep, 600)\n" + HOOK.format(body="return None"),
    "limits": (
        "import signal, sys\nsys.setrecursionlimit(200)\nsys.meta_path.clear()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n" + HOOK.format(body="return None")
    ),
    "forks": "import os\n" + HOOK.format(body="os.fork()"),
    "crashes": "import os\nos.abort()\n",
}


@pytest.fixture
def explain(tmp_path):
    """Run ``explain`` with these plugins installed."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["AcmeForCausalLM"]}))
    (tmp_path / "engine.yaml").write_text("cache_transceiver_config: {backend: NIXL}\n")

    def run(*names):
        for name in names:
            metadata = tmp_path / f"{name}-1.0.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (metadata / "entry_points.txt").write_text(f"[kvferry]\n{name} = {name}_plugin\n")
            (tmp_path / f"{name}_plugin.py").write_text(PLUGINS[name])
        command = [sys.executable, "-m", "kvferry.cli.main", "explain", "--json", "--config", "engine.yaml"]
        return subprocess.run(
            [*command, "--model", "config.json"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_no_plugin_ends_the_command_or_keeps_it_from_ending(explain):
    done = explain("ends_python", "lingers", "limits", "forks")
    assert done.returncode == 0, done.stderr
    warnings = json.loads(done.stdout)["warnings"]

    def told(name):
        return [each for each in warnings if name in each]

    (ended,) = told("ends_python (ends_python 1.0)")
    assert "os._exit(0), which would have ended this command" in ended
    (limits,) = told("'limits' (limits 1.0)")
    assert "sets the recursion limit to 200 (put back)" in limits
    assert "(sys.meta_path) (put back)" in limits
    assert "blocks signals (put back)" in limits
    (forks,) = told("'forks' (forks 1.0)")
    assert "its hook preferred_transceiver_runtime forks 1 time(s) (the child was ended)" in forks
    assert "plugin 'lingers' (lingers 1.0) has left to be called at the end takes more than" in done.stderr


def test_of_a_crash_the_file_is_told(explain):
    done = explain("crashes")
    assert done.returncode < 0
    assert "crashes_plugin.py" in done.stderr
