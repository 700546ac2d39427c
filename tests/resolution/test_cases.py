"""Every case of ``../shared/cases/resolution.yaml``, asked of ``resolve`` and of the command."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kvferry.checkpoint import ModelSpec
from kvferry.cli.explain import plain_plan
from kvferry.cli.main import main
from kvferry.cli.output import error_items, exit_status
from kvferry.config.nested import get_leaf
from kvferry.dispatcher import resolve
from kvferry.testing import isolated_registry
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.testing import FakeModelPlugin

REPOSITORY = Path(__file__).parents[2]
CASES_FILE = REPOSITORY.parent / "shared" / "cases" / "resolution.yaml"
BACKEND = "cache_transceiver_config.backend"
RUNTIME = "cache_transceiver_config.transceiver_runtime"


def load_cases() -> list:
    if not CASES_FILE.is_file():
        pytest.fail(f"{CASES_FILE} is missing: the cases stand beside the repository", pytrace=False)
    cases = yaml.safe_load(CASES_FILE.read_text())
    return [pytest.param(case, id=case["id"]) for case in cases]


cases = pytest.mark.parametrize("case", load_cases())


def fakes(case: dict) -> list[FakeModelPlugin]:
    return [
        FakeModelPlugin(one["arch"], runtime=one.get("runtime"), defaults=one.get("defaults"), name=one.get("name"))
        for one in case.get("plugins", ())
    ]


def check(expect: dict, status: int, answer: dict) -> None:
    assert answer["ok"] is (status == 0)
    if "error" in expect:
        assert status == 2
        texts = [str(text) for error in answer["errors"] for text in error.values()]
        assert any(expect["error"] in text for text in texts), texts
        return
    assert status == 0, answer["errors"]
    decisions = {decision["setting"]: decision for decision in answer["decisions"]}
    backend, runtime = decisions[BACKEND], decisions[RUNTIME]
    found = {
        "runtime": answer["transceiver"]["runtime"] if answer["transceiver"]["enabled"] else "off",
        "configured_runtime": runtime["value"],
        "backend": backend["value"],
        "source": runtime["source"],
        "env_var": backend["by"] if backend["source"] == "environment" else None,
        "manager": answer["kv_cache_manager"],
    }
    assert answer["transceiver"]["backend"] == backend["value"]
    for name, wanted in expect.items():
        if name == "warns":
            assert any(wanted in warning for warning in answer["warnings"]), answer["warnings"]
        elif name == "value":
            assert {key: get_leaf(answer["effective"], key) for key in wanted} == wanted
        else:
            assert found[name] == wanted, (name, answer["decisions"])


@cases
def test_resolve_answers_the_case(case):
    registry = isolated_registry(*fakes(case), builtin_models=True)
    model = ModelSpec(case["arch"]) if "arch" in case else None
    try:
        plan = resolve(
            case["config"],
            model=model,
            registry=registry,
            environ=case.get("env", {}),
            execution_architecture=case.get("exec"),
        )
    except KvferryError as error:
        check(case["expect"], exit_status(error), {"ok": False, "errors": error_items(error)})
    else:
        check(case["expect"], 0, {"ok": True, "warnings": plan.warnings, "errors": [], **plain_plan(plan, model=None)})


@cases
def test_the_command_answers_the_case(case, tmp_path, monkeypatch):
    arguments = ["explain", "--json", "--config", str(tmp_path / "engine.yaml")]
    (tmp_path / "engine.yaml").write_text(yaml.safe_dump(case["config"]))
    if "arch" in case:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [case["arch"]]}))
        arguments += ["--model", str(tmp_path)]
    if "exec" in case:
        arguments += ["--execution-architecture", case["exec"]]
    for number, fake in enumerate(fakes(case), 1):
        module = fake.write_module(tmp_path, fake.name or f"fake_{number}").stem
        monkeypatch.delitem(sys.modules, module, raising=False)
        arguments += ["-p", module]
    monkeypatch.syspath_prepend(str(tmp_path))
    for variable, value in case.get("env", {}).items():
        monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    check(case["expect"], result.exit_code, json.loads(result.stdout))


def test_no_case_is_lost():
    assert len(load_cases()) == CASES_FILE.read_text().count("- {id:")
    assert len({case.values[0]["id"] for case in load_cases()}) == len(load_cases())


def test_the_cases_own_variables_are_the_only_selectors():
    assert not [name for name in os.environ if name.startswith("TRTLLM_USE_")]
