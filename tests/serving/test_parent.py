"""A worker that was started by somebody says whether it has the same plugins."""

import copy
import json
import os
import subprocess
import sys

import pytest
from serving.conftest import CONFIG, running_worker

from kvferry.registry.inheritance import VARIABLE, announce_plugin_set
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Toggles, flag_layers


@pytest.fixture(scope="module")
def told():
    """What a parent announces that has every plugin but ``gemma``."""
    environ: dict[str, str] = {}
    announce_plugin_set(load_registry(toggles=Toggles(tuple(flag_layers(["no:gemma"])))), environ)
    return environ


@pytest.fixture
def announced(told, monkeypatch):
    monkeypatch.setenv(VARIABLE, told[VARIABLE])


SMALL = {**copy.deepcopy(CONFIG), "kv_cache_config": {"max_tokens": 256, "tokens_per_block": 32}}


def test_a_started_worker_says_what_it_has_beside_its_parent(announced, tmp_path_factory, tiny_checkpoint):
    with running_worker(tmp_path_factory, "context", str(tiny_checkpoint("llama")), SMALL) as worker:
        parent = worker.status()["parent"]
        added = [each for each in parent["plugins"] if each["parent"] is None]
        assert (parent["pid"], [each["plugin"] for each in added]) == (os.getpid(), ["gemma"])
        assert added[0]["here"].startswith("kvferry ")
        explained = [sys.executable, "-m", "kvferry", "explain", "--worker", worker.process.http]
        shown = subprocess.run(explained, capture_output=True, text=True, timeout=120, check=True).stdout
        told = f"parent process {os.getpid()}, with other plugins (gemma: not on there, kvferry"
        assert told in " ".join(shown.split())


@pytest.fixture
def start(tmp_path, tiny_checkpoint):
    """Start a worker that compares, and then finds no room for its cache."""
    config = tmp_path / "engine.yaml"
    config.write_text("cache_transceiver_config: {backend: NIXL}\nkv_cache_config: {free_gpu_memory_fraction: 0}\n")
    command = ["worker", "--role", "context", "--model", str(tiny_checkpoint("llama")), "--config", str(config)]
    return lambda *arguments: run(tmp_path, *command, *arguments)


def run(folder, *command):
    return subprocess.run(
        [sys.executable, "-m", "kvferry", *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )


def test_a_plugin_that_both_left_out_is_nothing_to_warn_of(announced, start):
    done = start("-p", "no:gemma")
    assert "would get no block" in done.stderr  # it came as far as to compare
    assert "gemma" not in done.stderr


def test_a_difference_is_a_warning_that_names_the_plugin_and_the_parent(announced, start):
    done = start()
    assert "WARNING kvferry: plugin 'gemma': not on in the parent, kvferry" in done.stderr
    assert f"the parent is process {os.getpid()}" in done.stderr


def test_a_locked_worker_with_other_plugins_than_its_parent_does_not_start(announced, start, tmp_path):
    locked = run(tmp_path, "plugins", "lock")
    assert locked.returncode == 0, locked.stderr
    done = start("--locked", "--json")
    error = json.loads(done.stdout)["errors"][0]
    assert done.returncode == 2
    assert "its plugins are not those of process" in error["message"]
    assert "plugin 'gemma'" in error["message"]
