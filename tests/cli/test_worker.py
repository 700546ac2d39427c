import json
import socket

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main
from kvferry.serving.http_server import bind_http

ON = "cache_transceiver_config: {backend: NIXL, transceiver_runtime: PYTHON}\nkv_cache_config: {max_tokens: 64}\n"


@pytest.fixture
def start(tmp_path):
    """Start a worker that cannot be started; its exit status and words."""

    def run(*arguments: str, config: str = ON, model: str = "smollm2"):
        path = tmp_path / "engine.yaml"
        path.write_text(config)
        command = ["worker", "--role", "context", "--model", model, "--config", str(path), *arguments]
        result = CliRunner().invoke(main, command)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.output

    return run


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_http_listens_on_loopback_only(start, host):
    status, said = start("--host", host)
    assert status == 2
    assert "beyond loopback" in said


@pytest.mark.parametrize("option", ["--port", "--control-bind"])
def test_a_port_in_use_ends_the_start_at_once_and_is_named(start, option):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, said = start(option, str(port) if option == "--port" else f"tcp://127.0.0.1:{port}")
    assert status == 2
    assert f"127.0.0.1:{port}" in said
    assert "Traceback" not in said


def test_a_control_socket_beyond_loopback_needs_peers(start):
    status, said = start("--control-bind", "tcp://0.0.0.0:0")
    assert status == 2
    assert "peers" in said


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:99999", "127.0.0.1:5000", "ipc:///tmp/x"])
def test_a_control_endpoint_that_is_none_is_said_before_the_model_is_looked_for(start, endpoint):
    status, said = start("--control-bind", endpoint, model="no-such-model")
    assert status == 2
    assert f"--control-bind '{endpoint}'" in said


def test_a_worker_without_a_transceiver_is_refused(start):
    status, said = start(config="kv_cache_config: {max_tokens: 64}\n")
    assert status == 2
    assert "transceiver is off" in said


@pytest.mark.parametrize(
    ("config", "status", "words"),
    [
        ("cache_transceiver_config: {backend: NIXL, transceiver_runtime: CPP}\n", 1, "kvferry[cpp]"),
        ("cache_transceiver_config: {backend: CARRIER_PIGEON}\n", 2, "CARRIER_PIGEON"),
        ("cache_transceiver_conf: {backend: NIXL}\n", 2, "cache_transceiver_config"),
    ],
    ids=["not built here", "unknown backend", "misspelt key"],
)
def test_a_configuration_that_cannot_be_served_is_one_paragraph(start, without_native, config, status, words):
    exit_code, said = start(config=config)
    assert exit_code == status, said
    assert words in said
    assert "Traceback" not in said


def test_a_model_that_is_not_there_is_named(start):
    status, said = start(model="smollm3")
    assert status == 2
    assert "smollm3" in said


def test_a_failed_start_is_one_json_object_too(start):
    status, said = start("--json", "--host", "0.0.0.0")
    answer = json.loads(said)
    assert status == 2
    assert (answer["ready"], answer["ok"]) == (False, False)
    assert answer["errors"][0]["setting"] == "host"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_any_free_port_can_be_had(host):
    with bind_http(host, 0) as bound:
        assert bound.getsockname()[1] > 0
