import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner

from kvferry.cli.demo import demo_settings
from kvferry.cli.main import main
from kvferry.config import parse_engine_args
from kvferry.demo.processes import WorkerFailedError, WorkerProcess
from kvferry.transceiver.keys import KEY_FILE_VARIABLE

COMMAND = [sys.executable, "-m", "kvferry", "demo"]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}


def run_demo(*arguments: str, seconds: float = 200):
    return subprocess.run(
        [*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds, check=False
    )


def test_the_demo_equals_aggregated_decoding_and_shows_what_travelled(tmp_path, read_trace):
    trace = tmp_path / "trace.json"
    result = run_demo("--json", "--max-tokens", "6", "--trace", str(trace))
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["ok"], answer["equal"]) == (True, True)
    assert answer["plan"]["transceiver"]["runtime"] == "PYTHON"
    first, second, third = answer["prompts"]
    for prompt in answer["prompts"]:
        assert prompt["output_token_ids"] == prompt["aggregated_token_ids"]
        assert prompt["handoff_ms"] > 0
        assert prompt["gigabytes_per_second"] > 0
        assert prompt["time_to_first_token_ms"] > 0
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 0)
    assert third["cached_tokens"] >= 96
    assert third["bytes"] < second["bytes"]
    assert "loading the model" in result.stderr
    events = read_trace(trace)
    assert len({event["pid"] for event in events}) == 2
    assert sum(event["ph"] == "b" and event["name"] == "request" for event in events) == 6
    assert sum(event["name"] == "decode" for event in events) == 15


def test_gemma_goes_through_the_pair_generation_first_and_pipelined():
    how = ("--manager", "v2", "--schedule", "generation-first", "--pipelined", "--prefill-chunk", "64")
    result = run_demo("--json", "--model", "gemma3", "--max-tokens", "4", *how, seconds=600)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["used"] == {
        "kv_cache_manager": "V2",
        "runtime": "PYTHON",
        "backend": "NIXL",
        "enable_block_reuse": True,
        "schedule_style": "generation_first",
        "enable_pipelined_transfer": True,
    }
    _, second, third = answer["prompts"]
    assert third["cached_tokens"] >= 96
    assert third["bytes"] < second["bytes"]


def test_what_cannot_be_built_is_one_clear_paragraph(without_native):
    result = CliRunner().invoke(main, ["demo", "--runtime", "CPP"])
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    assert "this plan cannot be built here: runtime CPP" in result.stderr
    assert "pip install 'kvferry[cpp]'" in result.stderr


def test_what_is_wrong_with_the_input_is_said_before_anything_starts():
    result = run_demo("--backend", "CARRIER_PIGEON", "--json")
    assert result.returncode == 2
    assert "CARRIER_PIGEON" in json.loads(result.stdout)["errors"][0]["message"]


@pytest.mark.parametrize("prompt", [b"", b"bad \xff byte"], ids=str)
def test_a_prompt_that_is_no_text_is_refused_before_anything_starts(prompt):
    result = subprocess.run(
        [*COMMAND, "--prompt", prompt], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("kvferry: --prompt ")
    assert "worker" not in result.stderr


def test_a_key_that_cannot_be_used_is_said_before_anything_starts(tmp_path):
    (tmp_path / "key").write_text("no key")
    (tmp_path / "key").chmod(0o600)
    environment = {**ENVIRONMENT, KEY_FILE_VARIABLE: str(tmp_path / "key")}
    result = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert str(tmp_path / "key") in result.stderr
    assert "worker" not in result.stderr


def test_what_the_workers_refuse_is_one_paragraph_without_their_logs():
    result = run_demo("--max-tokens", "1000000", "--prompt", "Hi", "--json")
    assert result.returncode == 2, result.stderr
    (error,) = json.loads(result.stdout)["errors"]
    assert "max_tokens=1000000 exceed" in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_signal_leaves_nothing_behind(tmp_path, number, hears_interrupts):
    process = subprocess.Popen(
        COMMAND,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )
    deadline = time.monotonic() + 60
    while len(children := psutil.Process(process.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.glob("kvferry-demo-*"))
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert psutil.wait_procs(children, timeout=5)[1] == []
    assert not list(tmp_path.glob("kvferry-demo-*"))


def test_ctrl_c_ends_the_workers(hears_interrupts):
    process = subprocess.Popen(
        COMMAND,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hears_interrupts,
    )
    deadline = time.monotonic() + 60
    while len(children := psutil.Process(process.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(children) == 2
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    # click ends with 1; CPython overrules it with the signal where the interrupt met code that a library runs from text
    assert process.returncode in (1, -signal.SIGINT), said
    assert "Aborted!" in said
    assert "Traceback" not in said
    assert psutil.wait_procs(children, timeout=5)[1] == []


def test_a_killed_demo_takes_its_workers_along():
    process = subprocess.Popen(COMMAND, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(children := psutil.Process(process.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert len(children) == 2
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_worker_that_does_not_start_is_quoted():
    arguments = ("--role", "context", "--model", "smollm2", "--host", "192.0.2.1")
    message = r"context worker cannot start: --host 192\.0\.2\.1 is beyond"
    with (
        WorkerProcess("context", arguments, lambda text: None) as worker,
        pytest.raises(WorkerFailedError, match=message),
    ):
        worker.wait_ready()


def test_a_worker_that_dies_is_quoted_with_its_last_lines():
    message = r"(?s)generation worker did not start \(it ended with status 2\).*--no-such-option"
    with (
        WorkerProcess("generation", ("--no-such-option",), lambda text: None) as worker,
        pytest.raises(WorkerFailedError, match=message),
    ):
        worker.wait_ready()


def test_flags_beat_the_file_and_the_file_beats_the_demos_defaults():
    written = {"cache_transceiver_config": {"backend": "UCX"}, "kv_cache_config": {"max_tokens": 640}}
    settings = demo_settings(parse_engine_args(written), None, "auto")
    assert settings["cache_transceiver_config"] == {"backend": "UCX", "transceiver_runtime": "auto"}
    assert settings["kv_cache_config"] == {"dtype": "float32", "max_tokens": 640}
    chosen = demo_settings(parse_engine_args(written), None, None, "V1", no_reuse=True, pipelined=True)
    assert chosen["cache_transceiver_config"]["enable_pipelined_transfer"] is True
    assert chosen["kv_cache_config"]["use_kv_cache_manager_v2"] is False
    assert chosen["kv_cache_config"]["enable_block_reuse"] is False
    nothing = demo_settings(parse_engine_args({}), "nixl2", None)
    assert nothing["cache_transceiver_config"] == {"backend": "nixl2", "transceiver_runtime": "PYTHON"}
