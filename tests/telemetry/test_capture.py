import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvferry
from kvferry.checkpoint import ModelSpec
from kvferry.config import parse_engine_args
from kvferry.dispatcher import resolve
from kvferry.registry.freezing import freeze
from kvferry.telemetry import capture, committed_manifest
from kvferry.telemetry.canonical import digest
from kvferry.telemetry.capture import BY, ITEMS_LIMIT, OTHER, SIZE_LIMIT
from kvferry.telemetry.manifest import Manifest
from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.testing import FakeModelPlugin
from kvferry_plugins.types import Decision, RuntimeSupport, TransferBackend

BACKEND = "cache_transceiver_config.backend"
RUNTIME = "cache_transceiver_config.transceiver_runtime"
MANAGER = "kv_cache_config.use_kv_cache_manager_v2"
BLOCK = "kv_cache_config.tokens_per_block"
WINDOW = "kv_cache_config.max_attention_window"
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


class Backend:
    """A plugin that brings a transport of any name."""

    def __init__(self, name: str, backend: str) -> None:
        self.name, self.backend = name, backend

    @hookimpl
    def transfer_backends(self):
        return [TransferBackend(name=self.backend, runtimes={"CPP": RuntimeSupport()}, probe="acme:probe")]


def planned(config, *plugins, architecture="AcmeForCausalLM", environ=None, origin=None, builtin_models=False):
    return resolve(
        parse_engine_args(config, origin=origin),
        model=ModelSpec(architecture),
        registry=isolated_registry(*plugins, builtin_models=builtin_models),
        environ=environ or {},
    )


def test_requested_and_resolved_are_both_there_with_who_decided():
    fake = FakeModelPlugin("AcmeForCausalLM", runtime="PYTHON", defaults={"kv_cache_config": {"tokens_per_block": 64}})
    config = {"cache_transceiver_config": {"backend": "DEFAULT"}, "max_batch_size": 4}
    fields = capture(planned(config, fake, environ={"TRTLLM_USE_NIXL_KVCACHE": "1"}, origin="/home/me/e.yaml")).fields

    assert fields[BACKEND] == {
        "requested": "DEFAULT",
        "resolved": "NIXL",
        "source": "environment",
        "by": "variable",
    }
    assert fields[RUNTIME] == {"requested": "auto", "resolved": "PYTHON", "source": "model", "by": "other plugin"}
    assert fields[MANAGER] == {"requested": "auto", "resolved": False, "source": "fallback"}
    assert fields[BLOCK] == {"requested": 32, "resolved": 64, "source": "model", "by": "other plugin"}
    assert fields["max_batch_size"] == {"requested": 4, "resolved": 4, "source": "user", "by": "file"}
    assert fields["device"] == {"requested": "auto", "resolved": "auto", "source": "default"}


def test_a_plugin_of_ours_is_told_from_another_but_not_named():
    config = {"cache_transceiver_config": {"backend": "NIXL"}}
    captured = capture(planned(config, architecture="LlamaForCausalLM", builtin_models=True))

    assert captured.fields[RUNTIME]["by"] == "built-in plugin"
    assert "llama" not in captured.text.lower()


def test_a_strangers_backend_is_other():
    config = {"cache_transceiver_config": {"backend": "SECRET_FABRIC"}}
    captured = capture(planned(config, Backend("acme", "SECRET_FABRIC")))

    assert captured.fields[BACKEND]["requested"] == OTHER
    assert captured.fields[BACKEND]["resolved"] == OTHER
    assert "SECRET" not in captured.text


def test_the_settings_of_a_section_that_is_not_there_are_not_there():
    fields = capture(planned({})).fields

    assert not [key for key in fields if key.startswith("cache_transceiver_config")]
    assert BLOCK in fields


def test_what_is_left_out_is_counted_by_what_it_is_and_not_quoted():
    config = {
        "kv_cache_config": {
            "use_kv_cache_manager_v2": True,
            "disk_cache_path": "/secret/folder",
            "disk_cache_size": 1,
        },
        "peers": [{"endpoint": "tcp://secret.host:1", "public_key": KEY}],
        "plugins": {"disable": ["secret"], "prefer": {"SecretForCausalLM": "acme"}},
    }
    captured = capture(planned(config, FakeModelPlugin("SecretForCausalLM", name="acme")))

    assert captured.excluded == {"list of section": 1, "list of text": 1, "mapping": 1, "path": 1}
    assert "secret" not in captured.text.lower()
    assert KEY not in captured.text


def test_the_text_is_canonical_and_names_its_versions_manifest_and_digest():
    captured = capture(planned({}))
    again = capture(planned({}))

    assert captured.text == again.text == json.dumps(json.loads(captured.text), sort_keys=True, separators=(",", ":"))
    held = json.loads(captured.text)
    assert (held["capture"], held["policy"]) == (1, 1)
    assert held["manifest"] == committed_manifest().plain()["digest"]
    assert captured.digest == digest(held)
    assert captured.digest != capture(planned({"max_batch_size": 9})).digest


def hand_made(value, setting=BLOCK, **changes):
    """A plan in which one decision holds what no schema would let through."""
    plan = planned({})
    section, _, name = setting.rpartition(".")
    effective = {**plan.effective, section: {**plan.effective[section], name: value}}
    decision = Decision(setting, value, value, **{"source": "user", "by": None, "reason": "", **changes})
    return dataclasses.replace(plan, decisions=(decision,), effective=freeze(effective))


@pytest.mark.parametrize(
    "value", ["32", True, float("nan"), float("inf"), 2**53 + 1, 10**400, [32], {"a": 1}, object()], ids=type
)
def test_what_is_no_plain_number_is_excluded(value):
    captured = capture(hand_made(value))

    assert BLOCK not in captured.fields
    assert captured.excluded == {"unsafe value": 1}


@pytest.mark.parametrize("value", [[1, "a"], [True], "12", [float("nan")], [1] * (ITEMS_LIMIT + 1)], ids=len)
def test_what_is_no_list_of_plain_numbers_is_excluded(value):
    assert WINDOW not in capture(hand_made(value, WINDOW)).fields


def test_one_is_not_true():
    assert MANAGER not in capture(hand_made(1, MANAGER)).fields


def test_a_setting_that_nobody_knows_is_counted_and_not_named():
    captured = capture(hand_made(1, "kv_cache_config.secret"))

    assert captured.excluded == {"unknown setting": 1}
    assert "secret" not in captured.text


def test_a_capture_that_would_be_too_large_loses_its_largest_fields():
    committed = committed_manifest()
    numbers = dataclasses.replace(committed.rules[WINDOW], key="windows")
    many = {f"windows.w{number:02}": numbers for number in range(40)}
    plan = planned({})
    values = {key.partition(".")[2]: tuple(range(200)) for key in many}
    plan = dataclasses.replace(plan, effective=freeze({**plan.effective, "windows": values}))
    rules = {**committed.rules, **{key: dataclasses.replace(rule, key=key) for key, rule in many.items()}}
    captured = capture(plan, manifest=Manifest(rules, committed.plugins))

    assert len(captured.text.encode()) <= SIZE_LIMIT
    assert 0 < captured.excluded["size"] < len(many)
    assert BLOCK in captured.fields


# --- nothing but listed words ever comes through ------------------------------------------------------------------

WORDS = {
    *committed_manifest().rules,
    *(value for rule in committed_manifest().rules.values() for value in rule.values if isinstance(value, str)),
    *(rule.capture.removeprefix("never: ") for rule in committed_manifest().rules.values()),
    *("user", "environment", "model", "default", "fallback", "unsafe value", "unknown setting", "size"),
    *("requested", "resolved", "source", "by", "capture", "policy", "manifest", "fields", "excluded"),
    *BY,
    OTHER,
    committed_manifest().plain()["digest"],
}
"""Every text that a capture may hold."""


def texts(value):
    """Every text within a JSON value, keys too."""
    if isinstance(value, dict):
        return {*value, *(text for item in value.values() for text in texts(item))}
    if isinstance(value, list):
        return {text for item in value for text in texts(item)}
    return {value} if isinstance(value, str) else set()


free_text = st.text(min_size=1, max_size=12).filter(str.strip)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(name=free_text, path=free_text, backend=free_text, plugin=free_text, origin=free_text, value=st.integers(1, 99))
def test_no_free_text_of_a_configuration_comes_through(name, path, backend, plugin, origin, value):
    config = {
        "cache_transceiver_config": {"backend": backend},
        "kv_cache_config": {"disk_cache_path": path, "disk_cache_size": value, "use_kv_cache_manager_v2": True},
        "plugins": {"disable": [name], "prefer": {name: plugin}},
        "max_batch_size": value,
    }
    defaults = {"kv_cache_config": {"tokens_per_block": value}}
    plugins = FakeModelPlugin("Acme", runtime="CPP", name=plugin, defaults=defaults), Backend(f"{plugin}-2", backend)
    try:
        plan = planned(config, *plugins, architecture="Acme", origin=origin)
    except KvferryError:
        return
    captured = capture(plan)
    assert texts(json.loads(captured.text)) <= WORDS
    assert captured.fields["max_batch_size"]["resolved"] == value


@given(st.data())
def test_no_text_of_any_plan_whatever_comes_through(data):
    keys = st.sampled_from([*committed_manifest().rules]) | st.text()
    decisions = tuple(
        Decision(
            data.draw(keys), data.draw(anything), data.draw(anything), data.draw(st.text()), data.draw(st.text()), ""
        )
        for _ in range(3)
    )
    names = st.sampled_from([key.rpartition(".")[2] for key in committed_manifest().rules]) | st.text()
    effective = data.draw(st.dictionaries(names, anything | st.dictionaries(names, anything, max_size=4), max_size=6))
    plan = dataclasses.replace(planned({}), decisions=decisions, effective=effective)

    captured = capture(plan)

    assert texts(json.loads(captured.text)) <= WORDS
    assert len(captured.text.encode()) <= SIZE_LIMIT


QUIETLY = """
import sys
from kvferry.dispatcher import resolve
from kvferry.testing import isolated_registry
plan = resolve({"cache_transceiver_config": {"backend": "NIXL"}}, model=None, registry=isolated_registry(), environ={})
happened = []
def watch(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.system")):
        happened.append(event)
    elif event == "open" and isinstance(arguments[1], str) and set("wax+") & set(arguments[1]):
        happened.append(f"{event} {arguments[0]}")
sys.addaudithook(watch)
sys.dont_write_bytecode = True
from kvferry.telemetry import capture
assert capture(plan).text
print(happened, *sys.modules)
"""


def test_capturing_sends_writes_and_starts_nothing_and_imports_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", QUIETLY], capture_output=True, text=True, check=True)
    happened, *modules = done.stdout.split()

    assert happened == "[]"
    assert not {"torch", "nixl", "zmq", "numpy", "transformers", "httpx"}.intersection(modules)


def test_nobody_of_kvferrys_own_captures_anything():
    core = Path(kvferry.__file__).parent
    using = {
        str(path.relative_to(core))
        for path in core.rglob("*.py")
        if "kvferry.telemetry" in path.read_text() and path.parent.name != "telemetry"
    }
    assert using == {"cli/schema.py", "reference/documents.py", "reference/telemetry.py"}
