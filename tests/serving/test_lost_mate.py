import signal
import time

import httpx
import pytest
import yaml

from kvferry.demo.processes import WorkerProcess, started
from kvferry_backends.mpi_launch import launch

ROLES = ("context", "generation")
CONFIG = {
    "cache_transceiver_config": {"backend": "MPI", "transceiver_runtime": "CPP"},
    "kv_cache_config": {"dtype": "float32", "max_tokens": 1024},
    "device": "cpu",
}
SECONDS = 30


@pytest.fixture
def world(small_model, tmp_path, monkeypatch):
    """Both workers of an MPI world, which have not met for any request yet."""
    for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    config = tmp_path / "engine.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    arguments = ("--model", small_model, "--config", str(config))
    workers = {role: WorkerProcess(role, ("--role", role, *arguments), lambda text: None) for role in ROLES}
    with started(list(workers.values()), launch) as wait_ready:
        wait_ready()
        yield workers


def test_a_worker_whose_mate_has_died_is_not_ready_says_why_and_takes_nothing_new(world):
    dead, survivor = world["generation"], world["context"]
    with httpx.Client(base_url=survivor.http, timeout=SECONDS, trust_env=False) as http:
        assert http.get("/readyz").json() == {"status": "ready"}
        dead._process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while (answer := http.get("/readyz")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert answer.status_code == 503
        assert "restart both with one mpiexec" in answer.json()["status"]
        status = http.get("/status").json()
        assert (status["ready"], status["not_ready"]) == (False, answer.json()["status"])
        for params in ({}, {"disaggregated_params": {"request_type": "context_only"}}):
            refused = http.post("/v1/completions", json={"prompt": "Too late", "max_tokens": 1, **params})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (502, "peer_lost")
            assert "takes no new request" in error["message"]
            assert "restart both" in error["message"]
        survivor.terminate()
        assert survivor._process.wait(SECONDS) == 0
