import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main
from kvferry.cli.output import printable


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with nothing in it, and an environment that asks for nothing."""
    monkeypatch.chdir(tmp_path)
    for variable in [name for name in os.environ if name.startswith(("UCX_", "NIXL_", "LD_", "KVFERRY_"))]:
        monkeypatch.delenv(variable)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", *arguments])


def run_json(*arguments, status=0):
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def subjects(document, severity):
    return [each["subject"] for each in document["findings"] if each["severity"] == severity]


def test_all_backends_are_probed(project):
    result = run("--json")
    document = json.loads(result.stdout)

    assert document["schema"] == 1
    assert document["ok"] == (not document["errors"]) == (result.exit_code == 0)
    backends = {each["name"]: each for each in document["backends"]}
    assert set(backends) == {"MOONCAKE", "MPI", "NIXL", "UCX"}
    assert backends["NIXL"]["usable"]
    assert backends["NIXL"]["library"].startswith("nixl ")
    assert backends["NIXL"]["plugin"] == "nixl"
    assert document["plan"] is document["worker"] is None


def test_a_crash_and_a_hang_are_findings_and_the_rest_goes_on(install, project, monkeypatch):
    install("odd_probes", "import_raises", "kills_python")
    monkeypatch.setenv("ODD_PROBES_PID_FILE", str(project / "pid"))

    document = run_json("-p", "no:nixl", "-p", "no:mooncake", "-p", "no:mpi", "--timeout", "6", status=1)

    assert not document["ok"]
    assert {"CRASH", "HANG", "THROW", "import_raises", "kills_python"} <= set(subjects(document, "error"))
    assert {"FINE", "CHATTER", "UCX"} <= set(subjects(document, "ok"))
    failures = {each["name"]: each["failure"] for each in document["backends"]}
    assert failures["CRASH"] == "was killed by signal 11 (SIGSEGV)"
    assert failures["HANG"] == "did not end within 6 s"
    assert failures["FINE"] is None
    assert len(document["errors"]) == document["counts"]["error"]
    assert any(error["message"].startswith("CRASH: its probe was killed") for error in document["errors"])


def test_people_read_severity_subject_cause_and_fix_and_a_summary(install, project):
    install("odd_probes")

    result = run("--backend", "leave")

    assert result.exit_code == 1
    assert "  error    LEAVE: its probe ended Python with 5" in result.stdout
    assert "           cause: the last that it printed:" in result.stdout
    assert "           fix: tell the author of odd-probes 0.3" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 error"
    assert "\x1b" not in result.stdout
    assert "progress: probing LEAVE" in result.stderr


def test_strict_makes_warnings_count(install):
    install("odd_probes")

    assert run("--backend", "HALF").stdout.splitlines()[-1] == "1 warning"
    assert run("--backend", "HALF").exit_code == 0
    assert run("--backend", "HALF", "--strict").exit_code == 1
    assert run("--backend", "FINE").stdout.splitlines()[-1] == "no error, no warning"


def test_the_configuration_is_resolved_and_its_backend_matters(install, project):
    install("absent_backend")
    (project / "good.yaml").write_text("cache_transceiver_config: {backend: NIXL, transceiver_runtime: PYTHON}\n")
    (project / "bad.yaml").write_text("cache_transceiver_config: {backend: ABSENT, transceiver_runtime: PYTHON}\n")

    document = run_json("--backend", "UCX", "--config", "good.yaml")
    assert document["plan"]["transceiver"]["backend"] == "NIXL"
    assert "the plan" in subjects(document, "ok")

    document = run_json("--backend", "UCX", "--config", "bad.yaml", status=1)
    assert "pip install kvferry-no-such-module" in document["errors"][0]["message"]


def test_the_folder_of_the_disk_tier_is_looked_at(project):
    settings = "{use_kv_cache_manager_v2: true, disk_cache_size: 4096, disk_cache_path: absent}"
    (project / "engine.yaml").write_text(f"kv_cache_config: {settings}\n")
    document = run_json("--backend", "UCX", "--config", "engine.yaml")
    (finding,) = (each for each in document["findings"] if each["subject"] == "kv_cache_config.disk_cache_path")
    assert (finding["severity"], finding["fix"]) == ("warning", "mkdir -p absent")


def test_the_environment_of_the_command_is_looked_at(monkeypatch):
    monkeypatch.setenv("TRTLLM_USE_NIXL_KV_CACHE", "1")
    monkeypatch.setenv("KVFERRY_PLUGIN", "a")

    document = run_json("--backend", "UCX")

    assert subjects(document, "warning") == ["KVFERRY_PLUGIN", "TRTLLM_USE_NIXL_KV_CACHE"]
    assert len(document["warnings"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "gone.yaml"], "cannot read the configuration gone.yaml"),
        (["--config", "wrong.yaml"], "unknown key 'backendd'"),
        (["--backend", "UCXX"], "did you mean 'UCX'?"),
        (["-p", "lama"], "did you mean 'llama'?"),
        (["-p", "no:lama"], "did you mean 'llama'?"),
        (["--worker", "http://"], "is no http://HOST:PORT"),
        (["--timeout", "0"], "--timeout"),
        (["--timeout", "soon"], "--timeout"),
    ],
)
def test_wrong_input_is_status_2_and_one_paragraph(project, arguments, words):
    (project / "wrong.yaml").write_text("cache_transceiver_config: {backendd: NIXL}\n")

    result = run(*arguments)

    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_wrong_input_has_all_the_keys_of_an_answer():
    document = run_json("--config", "gone.yaml", status=2)

    assert set(document) == set(run_json("--backend", "UCX"))
    assert document["errors"][0]["type"] == "ConfigError"


def test_a_worker_that_does_not_answer_is_an_error_and_the_rest_is_looked_at(unused_port):
    document = run_json("--backend", "UCX", "--worker", f"127.0.0.1:{unused_port}", status=1)

    assert subjects(document, "error") == [f"127.0.0.1:{unused_port}"]
    assert subjects(document, "ok") == ["UCX"]
    assert document["worker"] is None


def test_a_running_worker_is_looked_at(worker, project):
    (project / "engine.yaml").write_text("cache_transceiver_config: {backend: UCX}\n")

    document = run_json("--backend", "UCX", "--worker", worker, "--config", "engine.yaml", status=1)

    assert document["worker"]["role"] == "context"
    told = [each["what"] for each in document["findings"] if each["area"] == "worker"]
    assert "its transfer loop is dead: it serves nobody" in told
    assert "runs with backend NIXL, and this configuration gives UCX" in told


def test_a_worker_of_another_version_is_told_and_not_stumbled_over(worker_that_says):
    with worker_that_says({"plan": {"decisions": []}, "transceiver": 3, "plugins": {}}) as address:
        document = run_json("--backend", "UCX", "--worker", address)

    assert "its status is not as this kvferry knows it" in document["warnings"][0]


def test_neither_torch_nor_a_transport_is_imported_by_the_command_itself():
    code = (
        "import sys; from kvferry.cli.main import main\n"
        "try:\n    main(['doctor', '--backend', 'UCX'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'nixl', 'libucx', 'mpi4py', 'mooncake', 'kvferry_native', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stderr.splitlines()[-1] == "[]"


def test_a_variable_that_is_no_text_is_no_stumbling_block(monkeypatch):
    monkeypatch.setenv(os.fsdecode(b"KVFERRY_\xff"), os.fsdecode(b"\xff"))
    monkeypatch.setenv("UCX_TLS", os.fsdecode(b"tcp,\xff"))

    assert "KVFERRY_" in " ".join(run_json("--backend", "UCX")["warnings"])
    assert run("--backend", "UCX").exit_code == 0


def test_control_c_ends_it_and_all_that_it_started(install, project, monkeypatch, has_gone, hears_interrupts):
    install("odd_probes")
    monkeypatch.setenv("ODD_PROBES_PID_FILE", str(project / "pid"))
    command = [sys.executable, "-m", "kvferry", "doctor", "--backend", "HANG"]

    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=hears_interrupts,
    ) as doctor:
        child = wait_for_pid(project / "pid")
        doctor.send_signal(signal.SIGINT)
        assert doctor.wait(15) != 0
        doctor.communicate()

    assert has_gone(child)


def wait_for_pid(path):
    for _ in range(1500):
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def test_what_strangers_say_moves_no_cursor():
    assert printable("a\x1b[2J\tb\r\nü") == "a [2J b  ü"


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as taken:  # bound, and never listening: nobody else gets it meanwhile
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def worker(worker_that_says):
    status = {
        "role": "context",
        "model": "smollm2",
        "ready": False,
        "draining": False,
        "plan": {"decisions": [], "transceiver": {"runtime": "PYTHON", "backend": "NIXL"}, "warnings": []},
        "plugins": {},
        "engine": {"alive": True},
        "transceiver": {"loop_alive": False, "endpoint": "tcp://127.0.0.1:4000"},
    }
    with worker_that_says(status) as address:
        yield address


@pytest.fixture
def worker_that_says():
    return serve_status


@contextlib.contextmanager
def serve_status(status):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(status).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()
