"""Preflight of files, of running workers, and of one of each, beside what the workers' real handshake says."""

import json

import pytest
import yaml
from click.testing import CliRunner
from serving.conftest import Pair, running_worker

from kvferry.cli.main import main
from kvferry.preflight.workers import side_from_worker
from kvferry.testing import isolated_registry
from kvferry_plugins.types import Role

CONFIG = {
    "cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": "PYTHON"},
    "kv_cache_config": {"tokens_per_block": 32, "max_tokens": 960},
    "device": "cpu",
}
UNLIKE = {
    **CONFIG,
    "cache_transceiver_config": {**CONFIG["cache_transceiver_config"], "kv_transfer_checksum": True},
    "kv_cache_config": {"tokens_per_block": 48, "max_tokens": 960},
}


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory, model):
    """Two real workers that refuse each other."""
    with (
        running_worker(tmp_path_factory, "context", model, CONFIG) as context,
        running_worker(tmp_path_factory, "generation", model, UNLIKE) as generation,
    ):
        yield Pair(context, generation)


@pytest.fixture
def files(tmp_path):
    for name, written in (("context", CONFIG), ("generation", UNLIKE)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(written))
    return str(tmp_path / "context.yaml"), str(tmp_path / "generation.yaml")


def preflight(*arguments):
    result = CliRunner().invoke(main, ["preflight", "--json", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return json.loads(result.stdout)


def named(answer, verdict):
    return {each["field"] for each in answer["fields"] if each["verdict"] == verdict}


def test_files_workers_and_the_handshake_itself_refuse_the_same_fields(pair, files, model):
    refused = {"tokens_per_block", "checksum"}
    asked = pair.generation.complete(**pair.prefill(prompt="a b c", max_tokens=4))
    assert asked.status_code == 502, asked.text
    assert all(name in asked.text for name in refused)
    addresses = pair.context.process.http, pair.generation.process.http
    for context in (files[0], addresses[0]):
        for generation in (files[1], addresses[1]):
            answer = preflight(context, generation, "--model", model)
            assert named(answer, "fatal") == refused, (context, generation)
            assert answer["ok"] is False
            assert {error["setting"] for error in answer["errors"]} == refused


def test_of_running_workers_hardly_anything_is_unknown(pair):
    answer = preflight(pair.context.process.http, pair.generation.process.http)
    assert named(answer, "unknown") == set()
    fine = {"protocol", "backend", "model.config", "model.weights", "layers", "plugins", "libraries", "role"}
    assert fine <= named(answer, "fine")
    assert answer["sides"]["context"]["running"] is True


def test_a_file_beside_a_worker_is_to_be_changed_first(pair, files):
    answer = preflight(pair.context.process.http, files[1])
    (blocks,) = (each for each in answer["fields"] if each["field"] == "tokens_per_block")
    assert [(change["where"], change["line"]) for change in blocks["changes"]] == [
        (files[1], "kv_cache_config: {tokens_per_block: 32}"),
        (pair.context.process.http, "kv_cache_config: {tokens_per_block: 48}, and start it again"),
    ]
    turned = preflight(files[0], pair.generation.process.http)
    (blocks,) = (each for each in turned["fields"] if each["field"] == "tokens_per_block")
    assert blocks["changes"][0]["where"] == files[0]


def test_workers_in_the_wrong_order_are_told(pair):
    answer = preflight(pair.generation.process.http, pair.context.process.http)
    assert "role" in named(answer, "fatal")


def test_a_transceiver_without_a_fingerprint_leaves_its_fields_unknown(pair):
    status = pair.context.status()
    del status["transceiver"]["fingerprint"]
    side = side_from_worker(Role.CONTEXT, "127.0.0.1:1", status, registry=isolated_registry())
    assert side.fact("backend").value == "NIXL"
    assert not side.fact("layers").known
    assert not side.fact("protocol").known
