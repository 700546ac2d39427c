"""A process that is started by another has the same plugins, or says which differ."""

import json
import os
import subprocess
import sys

import pytest

from kvferry.registry.inheritance import MOST_BYTES, VARIABLE, Inheritance, announce_plugin_set, inheritance_of
from kvferry.testing import isolated_registry
from kvferry_plugins.errors import PluginLoadError
from kvferry_plugins.testing import FakeModelPlugin


def registry(*names):
    return isolated_registry(*[FakeModelPlugin(f"{name}ForCausalLM", name=name) for name in names])


def announced(*names):
    environ: dict[str, str] = {}
    announce_plugin_set(registry(*names), environ)
    return environ


def test_the_same_set_is_the_same():
    inheritance = inheritance_of(registry("a", "b"), announced("b", "a"))
    assert inheritance == Inheritance(os.getpid())
    assert inheritance.dump() == {"pid": os.getpid(), "plugins": "same"}
    assert inheritance.warnings == ()
    inheritance.require_same()


def test_nobody_who_announces_is_no_parent():
    assert inheritance_of(registry(), {}) is None


def test_a_plugin_of_one_side_alone_is_named_with_both():
    inheritance = inheritance_of(registry("a", "c"), announced("a", "b"))
    assert inheritance.dump()["plugins"] == [
        {"plugin": "b", "parent": "(injected)", "here": None},
        {"plugin": "c", "parent": None, "here": "(injected)"},
    ]
    assert len(inheritance.warnings) == 2
    assert "plugin 'b': (injected) in the parent, not on here" in inheritance.warnings[0]
    assert f"process {os.getpid()}" in inheritance.warnings[0]


def test_a_difference_is_fatal_for_whoever_is_locked():
    with pytest.raises(PluginLoadError, match=r"this worker is locked.*plugin 'b'") as caught:
        inheritance_of(registry(), announced("b")).require_same()
    assert caught.value.plugin == "b"


def test_other_files_of_the_same_version_are_a_difference():
    environ = announced()
    told = json.loads(environ[VARIABLE])
    told["set"] = "sha256:other"
    told["digests"]["nixl"] = "sha256:other"
    told["plugins"]["nixl"] = isolated_registry().plugin_set()["nixl"]
    inheritance = inheritance_of(isolated_registry(), {VARIABLE: json.dumps(told)})
    nixl = isolated_registry().plugin_set()["nixl"]
    assert {"plugin": "nixl", "parent": nixl, "here": nixl} in inheritance.dump()["plugins"]
    (line,) = (line for line in inheritance.warnings if "nixl" in line)
    assert f"{nixl} has other files than in the parent (of " in line


def test_a_set_too_large_for_the_environment_is_told_by_its_digest(monkeypatch):
    many = [f"plugin-{number:04d}-{'x' * 60}" for number in range(1000)]
    environ = announced(*many)
    assert len(environ[VARIABLE]) < MOST_BYTES
    assert inheritance_of(registry(*many), environ).differences == ()
    (warning,) = inheritance_of(registry(*many[1:]), environ).warnings
    assert "too many" in warning
    done = subprocess.run([sys.executable, "-c", ""], env={**os.environ, **environ}, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "null",
        "7",
        "{}",
        '{"version": 2, "pid": 1, "set": "x"}',
        '{"version": 1, "pid": "1", "set": "x"}',
        '{"version": 1, "pid": 1, "set": "x", "plugins": {}}',
        '{"version": 1, "pid": 1, "set": "x", "plugins": {"a": 1}, "digests": {}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:60] or "empty",
)
def test_what_is_none_of_ours_is_no_parent(text):
    assert inheritance_of(registry(), {VARIABLE: text}) is None
