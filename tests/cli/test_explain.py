import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvferry.cli.explain import NOTHING_RESOLVED
from kvferry.cli.main import main
from kvferry_plugins.testing import FakeModelPlugin

HEAVY = ("torch", "nixl", "nixl_cu12", "transformers", "numpy", "rich", "zmq", "mpi4py", "ucxx", "mooncake", "libucx")
CODE = f"""
import sys
from kvferry.cli.main import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
DESIGNED = {"schema", "ok", "model", "decisions", "effective", "kv_cache_manager", "transceiver", "warnings", "errors"}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A configuration and a checkpoint, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine.yaml").write_text("cache_transceiver_config: {backend: NIXL}\n")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return tmp_path


def explain(*arguments: str, width: int = 120):
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(main, ["explain", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def explained(*arguments: str) -> dict:
    return json.loads(explain("--json", *arguments).stdout)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", CODE, "explain", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environ})


def test_the_json_has_the_keys_of_the_design(files):
    answer = explained("--config", "engine.yaml", "--model", ".")
    assert set(answer) == DESIGNED | {"providers"}
    assert answer["schema"] == 1
    assert answer["ok"] is True
    assert answer["model"] == {"architecture": "LlamaForCausalLM", "execution_architecture": "LlamaForCausalLM"}
    assert set(answer["effective"]) == {"kv_cache_config", "cache_transceiver_config"}
    assert answer["kv_cache_manager"] == "V1"
    assert answer["transceiver"] == {
        "enabled": True,
        "runtime": "PYTHON",
        "backend": "NIXL",
        "provider": "runtime_python",
    }
    assert answer["providers"] == {"backend": "nixl", "runtime": "runtime_python", "manager": "cache_manager_v1"}
    assert answer["errors"] == []
    for decision in answer["decisions"]:
        assert set(decision) == {"setting", "requested", "value", "source", "by", "reason", "candidates"}
        assert all(set(one) == {"value", "source", "by", "reason"} for one in decision["candidates"])
    settings = [decision["setting"] for decision in answer["decisions"]]
    assert settings == [
        "cache_transceiver_config.backend",
        "cache_transceiver_config.transceiver_runtime",
        "kv_cache_config.use_kv_cache_manager_v2",
    ]
    assert answer["decisions"][0]["by"] == "engine.yaml"


def test_without_a_model_there_is_none_and_without_a_configuration_the_defaults_hold(files):
    answer = explained()
    assert answer["model"] is None
    assert answer["effective"]["cache_transceiver_config"] is None
    assert answer["transceiver"] == {"enabled": False, "runtime": None, "backend": None, "provider": None}


def test_a_checkpoint_without_architectures_is_a_model_nonetheless(files):
    (files / "config.json").write_text("{}")
    answer = explained("--model", "config.json")
    assert answer["model"] == {"architecture": None, "execution_architecture": None}


def test_a_library_that_is_not_here_is_a_warning_and_no_provider(files, without_native):
    (files / "engine.yaml").write_text("cache_transceiver_config: {backend: UCX}\n")
    answer = explained("--config", "engine.yaml")
    assert answer["ok"] is True
    assert (answer["transceiver"]["runtime"], answer["transceiver"]["provider"]) == ("CPP", None)
    assert answer["providers"]["runtime"] is None
    assert any("kvferry_native" in warning and "kvferry[cpp]" in warning for warning in answer["warnings"])


def test_a_failure_has_all_keys_the_model_and_every_error(files):
    (files / "engine.yaml").write_text(
        "cache_transceiver_config: {backend: FOO, max_tokens_in_buffer: 33}\nkv_cache_config: {disk_cache_size: 1}\n"
    )
    result = explain("--json", "--config", "engine.yaml", "--model", ".")
    answer = json.loads(result.stdout)
    assert result.exit_code == 2
    assert answer["ok"] is False
    assert answer["model"]["architecture"] == "LlamaForCausalLM"
    assert set(answer) == DESIGNED | {"providers"}
    assert [error["setting"] for error in answer["errors"]] == [
        "cache_transceiver_config.backend",
        "cache_transceiver_config.max_tokens_in_buffer",
        "kv_cache_config.disk_cache_path",
    ]
    assert {**answer, **NOTHING_RESOLVED, "model": answer["model"]} == answer


def test_a_conflict_of_plugins_is_wrong_input(files, monkeypatch):
    monkeypatch.syspath_prepend(str(files))
    flags = []
    for name, runtime in (("acme_wish", "CPP"), ("zenith_wish", "PYTHON")):
        FakeModelPlugin("AcmeForCausalLM", runtime=runtime, name=name).write_module(files)
        flags += ["-p", name]
    (files / "config.json").write_text('{"architectures": ["AcmeForCausalLM"]}')
    result = explain("--config", "engine.yaml", "--model", ".", *flags)
    assert result.exit_code == 2
    assert "prefer: {AcmeForCausalLM: acme_wish}" in result.stderr
    settled = "plugins: {prefer: {AcmeForCausalLM: zenith_wish}}\n"
    (files / "engine.yaml").write_text("cache_transceiver_config: {backend: NIXL}\n" + settled)
    assert explained("--config", "engine.yaml", "--model", ".", *flags)["transceiver"]["runtime"] == "PYTHON"


@pytest.mark.parametrize("width", [40, 79, 100, 120, 200])
def test_people_see_setting_value_who_why_and_what_lost_at_any_width(files, width):
    (files / "engine.yaml").write_text("cache_transceiver_config: {backend: UCX}\nkv_cache_config: {max_tokens: 64}\n")
    result = explain("--config", "engine.yaml", "--model", ".", width=width)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(result.stdout.split())
    for words in (
        "LlamaForCausalLM",
        "manager V1",
        "CPP on UCX",
        "transceiver_runtime",
        "auto → null",
        "fallback",
        "you: engine.yaml",
        "tokens_per_block 32",
        "kv_transfer_timeout_ms 60000",
    ):
        assert words in text
    assert "PYTHON (llama)" in text
    assert "max_tokens" in text


def test_people_see_warnings_on_standard_error(files):
    (files / "engine.yaml").write_text("cache_transceiver_config: {backend: MPI}\n")
    result = explain("--config", "engine.yaml")
    assert "warning: backend MPI is deprecated" in result.stderr
    assert "deprecated" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--model", "missing"], "missing"),
        (["--config", "config.json", "--model", "engine.yaml"], "architectures"),
        (["-p", "nobody"], "nobody"),
    ],
)
def test_wrong_input_is_one_paragraph_and_status_2(files, arguments, word):
    result = explain(*arguments)
    assert result.exit_code == 2
    assert word in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("config", "environ", "status", "word"),
    [
        ("cache_transceiver_config: {backend: NIXL}", {}, 0, '"runtime": "PYTHON"'),
        ("cache_transceiver_config: {backend: DEFAULT}", {"TRTLLM_USE_UCX_KVCACHE": "1"}, 0, '"backend": "UCX"'),
        ("cache_transceiver_config: {backend: NIXL, runtime: CPP}", {}, 2, "transceiver_runtime"),
        ("cache_transceiver_config: [", {}, 2, "no valid YAML"),
    ],
)
def test_a_real_process_imports_nothing_heavy(files, config, environ, status, word):
    (files / "engine.yaml").write_text(config)
    result = run("--json", "--config", "engine.yaml", "--model", ".", **environ)
    assert (result.returncode, result.stderr) == (status, "[]\n")
    assert word in result.stdout
    assert json.loads(result.stdout)["ok"] is (status == 0)


def test_a_model_that_is_not_converted_yet_is_said_without_anything_heavy(files):
    (files / "tiny.gguf").write_bytes(b"GGUF")
    result = run("--model", "tiny.gguf", XDG_CACHE_HOME=str(files))
    assert result.returncode == 2
    assert result.stderr.startswith("kvferry: the model tiny.gguf is not converted yet")
    assert result.stderr.endswith("\n[]\n")
