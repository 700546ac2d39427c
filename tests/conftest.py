import importlib
import os
import signal
import sys
import time
from pathlib import Path

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
    """For ``preexec_fn``: a shell's background job ignores Ctrl-C, and so would all that it starts."""
    return lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)


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
