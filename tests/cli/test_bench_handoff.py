import json

import pytest
from click.testing import CliRunner

from kvferry.bench.handoff import WAYS
from kvferry.cli.main import main
from kvferry.testing.tiny_checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    return write_tiny_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")


def run(*arguments):
    return CliRunner().invoke(main, ["bench", "handoff", *map(str, arguments)])


def test_every_way_is_timed_and_traced_in_one_run(tiny_llama, tmp_path):
    trace = tmp_path / "trace.json"
    sizes = ("--prompt-tokens", 96, "--rounds", 1, "--output-tokens", 3, "--prefill-chunk", 32)

    result = run("--model", tiny_llama, *sizes, "--trace", trace, "--json")

    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["handoffs"]
    assert tuple(found["ways"]) == WAYS
    for way in found["ways"].values():
        assert 0 < way["seconds"]["first"] <= way["seconds"]["second"] <= way["seconds"]["total"]
        assert way["parts_seconds"]["prefill"] > 0
    assert found["bytes"] == 96 * 4 * 2 * 2 * 8 * 4  # tokens × layers × key and value × heads × dimension × float32
    assert found["ways"]["pipelined"]["exposed_seconds"] > 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"request", "queue", "prefill", "control", "wire", "attach", "decode"} <= names


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_measured(tiny_llama, tmp_path):
    result = run("--model", tiny_llama, "--trace", tmp_path / "absent" / "trace.json")

    assert result.exit_code == 2
    assert "cannot write the trace to" in result.stderr


def test_a_prompt_that_the_model_has_no_positions_for_is_refused(tiny_llama):
    result = run("--model", tiny_llama, "--prompt-tokens", 4096)

    assert result.exit_code == 2
    assert "the model has 2048 positions, 4104 are asked for" in result.stderr


def test_a_prompt_that_the_configured_workers_would_not_take_is_refused_before_they_are_started(tiny_llama, tmp_path):
    config = tmp_path / "engine.yaml"
    config.write_text("max_seq_len: 40\n")

    result = run("--model", tiny_llama, "--prompt-tokens", 100, "--config", config)

    assert result.exit_code == 2
    assert "'max_seq_len' is 40, and 108 tokens are asked for" in result.stderr
