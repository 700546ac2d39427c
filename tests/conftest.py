import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A machine under load is slow, which is no failure.
hypothesis.settings.register_profile("kvferry", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("kvferry")

PACKAGES = Path(__file__).parent / "packages"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _own_settings(tmp_path_factory, monkeypatch):
    """No test reads or writes the settings of whoever runs it."""
    home = tmp_path_factory.mktemp("settings")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    for variable in ("KVFERRY_PLUGINS", "KVFERRY_DISABLE_PLUGINS", "KVFERRY_DISABLE_PLUGIN_AUTOLOAD"):
        monkeypatch.delenv(variable, raising=False)
    for backend in ("NIXL", "UCX", "MOONCAKE", "MPI"):
        monkeypatch.delenv(f"TRTLLM_USE_{backend}_KVCACHE", raising=False)


@pytest.fixture
def hears_interrupts():
    """For ``preexec_fn``: a shell's background job ignores Ctrl-C, one under nohup SIGHUP, and so would their own."""

    def hear() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    return hear


@pytest.fixture
def without_native(monkeypatch):
    """As on a machine without the extra ``cpp``: find_spec finds nothing."""
    monkeypatch.setitem(sys.modules, "kvferry_native", None)


@pytest.fixture
def install(monkeypatch):
    """Put packages of ``tests/packages`` on the path, as if they were installed, the first first."""
    before = set(sys.modules)

    def put_on_path(*folders: str) -> None:
        for folder in reversed(folders):
            monkeypatch.syspath_prepend(str(PACKAGES / folder))
        path = ":".join(str(PACKAGES / folder) for folder in folders)
        monkeypatch.setenv("PYTHONPATH", path)
        importlib.invalidate_caches()

    yield put_on_path
    for name in set(sys.modules) - before:
        if str(PACKAGES) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(scope="session")
def read_trace():
    """Read a trace file as ui.perfetto.dev does, and say where it is not well formed; its events but for the names."""

    def read(path: Path) -> list[dict[str, Any]]:
        trace = json.loads(path.read_text())
        assert trace["displayTimeUnit"] == "ms"
        named = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
        events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
        open_ends: dict[tuple[Any, ...], list[float]] = {}
        begun: dict[tuple[Any, ...], list[tuple[str, float]]] = {}
        for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
            ends, end = open_ends.setdefault((event["pid"], event["tid"]), []), event["ts"] + event["dur"]
            while ends and ends[-1] <= event["ts"] + 0.01:
                ends.pop()
            assert event["dur"] >= 0
            assert not ends or end <= ends[-1] + 0.01, f"{event} overlaps another of its thread"
            ends.append(end)
        for event in events:
            assert event["pid"] in named
            assert event["ph"] in "Xben", event
            if event["ph"] == "X":
                continue
            track = begun.setdefault((event["pid"], event["cat"], event["id2"]["local"]), [])
            if event["ph"] == "b":
                assert not track or event["ts"] >= track[-1][1]
                track.append((event["name"], event["ts"]))
            elif event["ph"] == "e":
                name, since = track.pop()
                assert name == event["name"]
                assert event["ts"] >= since
        assert not [track for track in begun.values() if track], "a span without an end"
        return events

    return read


@pytest.fixture
def has_gone():
    """Tell whether a process ends within seconds; one that nobody reaps is gone, too."""

    def has_gone(pid: int) -> bool:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                return True
            if state == "Z":
                return True
            time.sleep(0.02)
        return False

    return has_gone


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """The folder of a model of ``kvferry.testing.tiny_checkpoints`` by name; written once a session."""
    written: dict[str, Path] = {}

    def folder(name: str) -> Path:
        from kvferry.testing.tiny_checkpoints import write_tiny_checkpoint

        if name not in written:
            written[name] = write_tiny_checkpoint(name, tmp_path_factory.mktemp(name) / name)
        return written[name]

    return folder
