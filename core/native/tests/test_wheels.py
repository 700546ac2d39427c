"""Wheels of both distributions, built here, in environments where no compiler is to be found."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHILD = Path(__file__).parent / "agent_child.py"
ON = "cache_transceiver_config: {backend: UCX}\n"


class Environment:
    """A virtual environment with nothing but its own programs on the path."""

    def __init__(self, folder, wheels):
        venv.create(folder, with_pip=True)
        self.bin = folder / "bin"
        self._wheels = wheels
        self._environ = {
            **{name: value for name, value in os.environ.items() if name.startswith(("HOME", "PIP_", "LANG"))},
            "PATH": str(self.bin),
        }

    def install(self, *requirements):
        self.run("pip", "install", "--quiet", "--only-binary", ":all:", "--find-links", self._wheels, *requirements)

    def run(self, program, *arguments, status=0):
        done = subprocess.run(
            [self.bin / program, *arguments],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    def start(self, *arguments):
        return subprocess.Popen(
            [self.bin / "python", *arguments],
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    for project in (ROOT, ROOT / "core/native"):
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, project]
        subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment"), wheels)


def ask(child, command, **arguments):
    child.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
    child.stdin.flush()
    return json.loads(child.stdout.readline())["answer"]


def test_without_the_native_wheel_the_rest_works_and_cpp_says_how_to_get_it(environment, tmp_path):
    environment.install("kvferry")
    (tmp_path / "engine.yaml").write_text(ON)
    answer = json.loads(environment.run("kvferry", "explain", "--config", tmp_path / "engine.yaml", "--json"))
    assert answer["transceiver"]["runtime"] == "CPP"
    assert answer["transceiver"]["provider"] is None
    assert any("pip install 'kvferry[cpp]'" in warning for warning in answer["warnings"])
    assert "runtime_cpp" in environment.run("kvferry", "plugins", "list")


def test_with_it_two_processes_move_bytes_over_ucx(environment, tmp_path):
    environment.install("kvferry[cpp,ucx]")
    (tmp_path / "engine.yaml").write_text(ON)
    answer = json.loads(environment.run("kvferry", "explain", "--config", tmp_path / "engine.yaml", "--json"))
    assert (answer["providers"]["backend"], answer["providers"]["runtime"]) == ("ucx", "runtime_cpp")
    assert not [warning for warning in answer["warnings"] if "torch" not in warning]  # left out: it is big
    writer, target = (environment.start(CHILD, "ucx", name, str(1 << 20), "{}") for name in ("writer", "target"))
    try:
        descriptors = [json.loads(child.stdout.readline()) for child in (writer, target)]
        ask(writer, "fill", seed=7)
        peer = ask(writer, "connect", descriptor=descriptors[1]["descriptor"])
        ask(target, "connect", descriptor=descriptors[0]["descriptor"])
        transfer = ask(writer, "write", peer=peer, address=descriptors[1]["address"])
        assert ask(writer, "outcome", transfer=transfer) == {"ok": True, "error": None}
        assert ask(target, "wrong_bytes", seed=7) == 0
    finally:
        for child in (writer, target):
            child.communicate(timeout=30)
    assert (writer.returncode, target.returncode) == (0, 0)
