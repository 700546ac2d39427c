import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main

HEAVY = ("torch", "nixl", "nixl_cu12", "transformers", "zmq", "mpi4py", "ucxx", "mooncake", "libucx", "kvferry_native")
CODE = f"""
import sys
from kvferry.cli.main import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 32,
    "dtype": "float32",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two configurations that agree, one that does not, and a checkpoint's configuration, in the working folder."""
    monkeypatch.chdir(tmp_path)
    alike = "cache_transceiver_config: {backend: NIXL}\n"
    (tmp_path / "context.yaml").write_text(alike)
    (tmp_path / "generation.yaml").write_text(alike)
    (tmp_path / "unlike.yaml").write_text(f"{alike}kv_cache_config: {{tokens_per_block: 48}}\n")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def preflight(*arguments: str, width: int = 120):
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(main, ["preflight", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_files_that_agree_are_fine_and_what_they_cannot_tell_is_not(files):
    result = preflight("context.yaml", "generation.yaml", "--model", ".", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert set(answer) == {"schema", "ok", "sides", "fields", "counts", "warnings", "errors"}
    assert (answer["schema"], answer["ok"], answer["errors"]) == (1, True, [])
    assert answer["counts"]["fatal"] == 0
    assert answer["counts"]["unknown"] > 0
    assert sum(answer["counts"].values()) == len(answer["fields"])
    for each in answer["fields"]:
        assert set(each) == {"field", "verdict", "context", "generation", "reason", "changes"}
        assert each["verdict"] != "unknown" or each["reason"]
    assert preflight("context.yaml", "generation.yaml", "--model", ".", "--strict").exit_code == 1


def test_one_model_without_weights_for_both_sides_is_one_model(files):
    answer = json.loads(preflight("context.yaml", "generation.yaml", "--model", "config.json", "--json").stdout)
    verdicts = {each["field"]: each["verdict"] for each in answer["fields"]}
    assert verdicts["model.weights"] == verdicts["model.config"] == "fine"


def test_each_side_may_have_a_model_of_its_own(files):
    (files / "other.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    models = ("--context-model", "config.json", "--generation-model", "other.json")
    answer = json.loads(preflight("context.yaml", "generation.yaml", *models, "--json").stdout)
    assert {error["setting"] for error in answer["errors"]} == {"model.config", "layers"}


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_people_see_the_worst_first_with_the_line_to_write_at_any_width(files, width):
    result = preflight("context.yaml", "unlike.yaml", "--model", ".", width=width)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= max(width, 60)
    text = " ".join(result.stdout.split())
    assert text.index("fatal tokens_per_block") < text.index("unknown") < text.index("fine")
    assert "in unlike.yaml: kv_cache_config: {tokens_per_block: 32}" in text
    assert "or in context.yaml: kv_cache_config: {tokens_per_block: 48}" in text
    assert "1 fatal, " in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("context.yaml", "missing.yaml"), "the generation side 'missing.yaml' is neither a file nor"),
        (("nowhere/c.yaml", "context.yaml"), "the context side 'nowhere/c.yaml' is neither a file nor"),
        (("context.yaml", "https://127.0.0.1:1"), "the generation side 'https://127.0.0.1:1' is no http://HOST:PORT"),
        (("context.yaml", "127.0.0.1:0"), "'127.0.0.1:0' is no http://HOST:PORT"),
        (("context.yaml", "broken.yaml"), "broken.yaml"),
        (("wrong.yaml", "context.yaml"), "wrong.yaml: 'cache_transceiver_confg': unknown key"),
        (("pigeon.yaml", "context.yaml"), "the context side, pigeon.yaml: "),
        (("context.yaml", "context.yaml", "--model", "nothing"), "no model 'nothing'"),
        (("context.yaml", "context.yaml", "-p", "no-such-plugin"), "no-such-plugin"),
        ((".", "context.yaml"), "cannot"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_input_is_one_paragraph_that_names_the_side(files, arguments, words):
    (files / "broken.yaml").write_text("{")
    (files / "wrong.yaml").write_text("cache_transceiver_confg: {backend: NIXL}\n")
    (files / "pigeon.yaml").write_text("cache_transceiver_config: {backend: PIGEON}\n")
    result = preflight(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    answer = json.loads(preflight(*arguments, "--json").stdout)
    assert (answer["ok"], answer["fields"], answer["counts"]) == (False, [], None)
    assert answer["errors"]


def test_several_mistakes_of_one_file_are_said_at_once(files):
    (files / "bad.yaml").write_text("cache_transceiver_config: {backend: FOO, max_tokens_in_buffer: 33}\n")
    answer = json.loads(preflight("context.yaml", "bad.yaml", "--json").stdout)
    assert [error["setting"] for error in answer["errors"]] == [
        "cache_transceiver_config.backend",
        "cache_transceiver_config.max_tokens_in_buffer",
    ]
    assert all("bad.yaml" in error["message"] for error in answer["errors"])


def test_where_nobody_answers_is_a_failed_check(files, unused_port):
    result = preflight("context.yaml", f"127.0.0.1:{unused_port}")
    assert result.exit_code == 1
    assert "no worker answers at" in result.stderr


def test_a_file_whose_name_is_like_an_address_is_a_file(files):
    (files / "host:80").write_text("cache_transceiver_config: {backend: NIXL}\n")
    assert preflight("context.yaml", "host:80").exit_code == 0


def test_neither_torch_nor_a_transport_is_imported(files):
    (files / "groups.yaml").write_text(
        "cache_transceiver_config: {backend: NIXL}\nkv_cache_config: {use_kv_cache_manager_v2: true}\n"
    )
    command = [sys.executable, "-c", CODE, "preflight", "context.yaml", "groups.yaml", "--model", "."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


STATUS = {"plan": {"decisions": [], "transceiver": {}}, "transceiver": {}, "plugins": {}}


@pytest.mark.parametrize(
    "status",
    [
        STATUS,
        {**STATUS, "transceiver": {"fingerprint": 7}},
        {**STATUS, "transceiver": []},
        {**STATUS, "role": "context", "plan": {**STATUS["plan"], "effective": None}},
    ],
    ids=["lacks its role", "a fingerprint that is none", "a transceiver that is none", "no configuration"],
)
def test_a_worker_that_describes_itself_otherwise_is_a_failed_check(files, status):
    handler = type("Handler", (BaseHTTPRequestHandler,), {"log_message": lambda *_: None})

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(status).encode())

    handler.do_GET = do_GET
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        result = preflight("context.yaml", f"127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join()
    assert result.exit_code == 1, result.output
    assert "describes itself as no version does that this kvferry knows" in result.stderr


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as taken:  # bound, and never listening: nobody else gets it meanwhile
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
