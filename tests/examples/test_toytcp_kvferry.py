import json
import shutil
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "toytcp-kvferry"
RUNTIME = "cache_transceiver_config.transceiver_runtime"

TWO_PROCESSES = """
from contextlib import ExitStack
import json
from kvferry.bench.processes import Child
with ExitStack() as stack:
    def start(role):
        options = {"role": role, "blocks": 64, "block_bytes": 65536, "config": {"backend": "TOYTCP"}}
        child = stack.enter_context(Child("kvferry.bench.peer", [json.dumps(options)], name=role))
        assert child.answer()["ready"]
        return child
    context, generation = start("context"), start("generation")
    for child in (context, generation):
        child.ask("permute", seed=len(child.name))
        child.ask("allocate", request=1, blocks=64)
    context.ask("fill", request=1, seed=7)
    generation.ask("poison", request=1)
    context.ask("respond", request=1)
    generation.ask("receive", request=1, **context.ask("params", request=1))
    (event,) = generation.ask("wait")["events"]
    print(json.dumps({**event, **generation.ask("wrong_blocks", request=1, seed=7)}))
"""


@pytest.fixture
def explain(with_toytcp, tmp_path):
    def explain(*arguments, runtime="auto"):
        section = f"{{backend: TOYTCP, transceiver_runtime: {runtime}}}"
        (tmp_path / "engine.yaml").write_text(f"cache_transceiver_config: {section}\n")
        done = with_toytcp("-m", "kvferry", "explain", "--config", "engine.yaml", *arguments, "--json", cwd=tmp_path)
        return done.returncode, json.loads(done.stdout)

    return explain


def test_explain_names_the_installed_plugin_as_provider_and_falls_back_to_python(explain):
    status, document = explain()
    (runtime,) = [each for each in document["decisions"] if each["setting"] == RUNTIME]

    assert status == 0
    assert document["providers"] == {"backend": "toytcp", "runtime": "runtime_python", "manager": "cache_manager_v1"}
    assert (runtime["value"], runtime["source"]) == ("PYTHON", "fallback")
    assert runtime["reason"].startswith("falls back to PYTHON, the only runtime of TOYTCP: ")


def test_cpp_on_it_is_refused(explain):
    status, document = explain(runtime="CPP")

    assert status == 2
    assert "backend TOYTCP does not run under CPP" in document["errors"][0]["message"]


def test_without_the_plugin_its_backend_is_unknown(explain):
    status, document = explain("-p", "no:toytcp")

    assert status == 2
    assert "toytcp" in document["errors"][0]["message"]


def test_a_hand_off_between_two_processes_arrives_by_value(with_toytcp):
    done = with_toytcp("-c", TWO_PROCESSES)

    assert done.returncode == 0, done.stderr
    event = json.loads(done.stdout)
    assert (event["outcome"], event["nbytes"], event["wrong"]) == ("completed", 64 * 65536, 0)


def test_its_own_tests_pass_there(with_toytcp, tmp_path):
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")

    done = with_toytcp("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "81 passed" in done.stdout
