"""What is built in one process is refused by name in a fork of it, and the process itself goes on.

A real fork of a process with real agents, each time in a process of its own (``forking.py``): the test's own is
never forked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("forking.py")
PAIRS = {
    "scripted": ("SCRIPTED", "PYTHON", ("runtime_python", "kvferry"), ("scripted", "(injected)")),
    "NIXL": ("NIXL", "PYTHON", ("runtime_python", "kvferry"), ("nixl", "kvferry")),
    "NIXL under CPP": ("NIXL", "CPP", ("runtime_cpp", "kvferry"), ("nixl", "kvferry")),
}


@pytest.fixture(scope="module", params=list(PAIRS))
def forked(request):
    """What a process said that was forked while a hand-off was under way, and what it ran."""
    backend, runtime, *_ = PAIRS[request.param]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), backend, runtime],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr
    return PAIRS[request.param], json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["fork", "multiprocessing"])
def test_everything_is_refused_in_the_child_naming_who_made_it_and_what_to_do(forked, way):
    (backend, runtime, transceiver, agent), result = forked
    said = result[way]["said"]
    assert len(said) == 25
    for name, error in said.items():
        assert isinstance(error, list), (name, error)
        message, parent, named_runtime, named_backend, plugin, distribution = error
        assert (parent, named_runtime, named_backend) == (result["pid"], runtime, backend), name
        expected = agent if name.startswith("agent.") else transceiver
        assert plugin == expected[0], name
        assert distribution.startswith(expected[1]), name
        for words in (name.removeprefix("agent."), str(result["pid"]), plugin, distribution, "spawn"):
            assert words in message, (name, words)


@pytest.mark.parametrize(("way", "status"), [("fork", 7), ("multiprocessing", 0)])
def test_a_child_that_shuts_everything_down_ends_as_it_wants_and_does_not_hang(forked, way, status):
    _, result = forked
    assert result[way]["hung"] is False
    assert result[way]["status"] == status


def test_the_parent_goes_on_with_what_was_under_way(forked):
    _, result = forked
    assert result["requests"] == 5
    assert result["drained"] == [True, True]


def test_the_parent_is_warned_once_by_name(forked):
    (backend, runtime, transceiver, agent), result = forked
    (message,) = result["messages"]
    for words in (f"({result['pid']}) was forked", backend, runtime, repr(transceiver[0]), repr(agent[0]), "spawn"):
        assert words in message


def test_subprocesses_and_spawned_ones_are_none_of_it(forked):
    _, result = forked
    assert result["others"] == {"plain": "1\n", "prepared": "2\n", "spawned": 0}
    assert result["messages_before"] == []


def test_a_child_of_a_process_whose_workers_are_shut_down_is_not_warned_of_and_builds_nothing(forked):
    _, result = forked
    message, parent = result["after"]["said"]
    assert parent == result["pid"]
    assert "build was called" in message
    assert result["messages_after"] == []


def test_a_forks_fork_names_the_process_that_built(forked):
    _, result = forked
    inner = result["grandchild"]["said"]
    assert (result["grandchild"]["status"], inner["status"]) == (7, 7)
    assert inner["said"][1] == result["pid"]


@pytest.mark.parametrize("added", [(), ("acme",)], ids=["the same", "another"])
def test_a_spawned_process_builds_and_says_what_it_has_of_its_parents_plugins(added):
    script = SCRIPT.with_name("spawning.py")
    done = subprocess.run([sys.executable, str(script), *added], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    differences = [{"plugin": name, "parent": None, "here": "(injected)"} for name in added]
    assert result["said"] == {"pid": result["pid"], "plugins": differences or "same"}
    assert result["status"] == 0
    for name in added:
        assert f"plugin {name!r}: not on in the parent, (injected) here" in done.stderr
