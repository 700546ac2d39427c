import json
import os
import signal
import subprocess
import sys

import pytest
from docs.page import PAIR_PORTS, run_page

PAIR_CONFIG = """\
cache_transceiver_config: {backend: NIXL}
kv_cache_config: {dtype: float32, max_tokens: 2048}
"""


@pytest.fixture(scope="session")
def shared_pair(tmp_path_factory, tiny_checkpoint):
    """Ports of a context and a generation worker of a tiny model, called ``smollm2``; they start when first wanted."""
    folder = tmp_path_factory.mktemp("pair")
    workers = []
    ports = {}

    def start(role):
        command = ["-m", "kvferry", "worker", "--role", role, "--model", "smollm2", "--config", "engine.yaml", "--json"]
        with (folder / f"{role}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def shared_ports():
        if not workers:
            (folder / "engine.yaml").write_text(PAIR_CONFIG)
            (folder / "smollm2").symlink_to(tiny_checkpoint("llama"))
            workers.extend(start(role) for role in ("context", "generation"))
            for named, worker in zip(PAIR_PORTS, workers, strict=True):
                ports[named] = json.loads(worker.stdout.readline())["http"].rpartition(":")[2]
        return ports

    yield shared_ports
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for worker in workers:
        worker.communicate(timeout=120)
        assert worker.returncode == 0


@pytest.fixture
def run(tmp_path, shared_pair, record_property):
    """Run a page in a folder of its own; what ran is printed, and a property of the test."""

    def run(path):
        ran = run_page(path, tmp_path, shared_pair)
        record_property("blocks", ran)
        print("\n".join(ran))

    return run
