import json
import shutil
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "acme-kvferry"
RUNTIME = "cache_transceiver_config.transceiver_runtime"


@pytest.fixture
def deployment(tmp_path):
    (tmp_path / "engine.yaml").write_text("cache_transceiver_config: {backend: NIXL}\n")
    (tmp_path / "acme-7b").mkdir()
    (tmp_path / "acme-7b" / "config.json").write_text(json.dumps({"architectures": ["AcmeForCausalLM"]}))
    return tmp_path


@pytest.fixture
def explain(fresh_environment, deployment):
    def explain(*arguments, **variables):
        document = fresh_environment.kvferry(
            "explain", "--config", "engine.yaml", "--model", "acme-7b", *arguments, cwd=deployment, **variables
        )
        (runtime,) = [each for each in document["decisions"] if each["setting"] == RUNTIME]
        return runtime["by"], document["effective"]["kv_cache_config"]["tokens_per_block"]

    return explain


@pytest.fixture
def listed(fresh_environment, deployment):
    def listed(*arguments, **variables):
        document = fresh_environment.kvferry("plugins", "list", *arguments, cwd=deployment, **variables)
        return {each["name"]: each for each in document["plugins"]}

    return listed


def test_the_environment_has_neither_torch_nor_a_transport(fresh_environment, deployment):
    code = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ['torch', 'nixl', 'transformers'])))"

    assert fresh_environment.run("python", "-c", code, cwd=deployment).returncode == 0


def test_an_installed_plugin_is_listed_and_decides(listed, explain):
    acme = listed()["acme"]

    assert (acme["distribution"], acme["version"], acme["origin"]) == ("acme-kvferry", "1.0", "external")
    assert (acme["state"], acme["entry_point"]) == ("discovered", "acme_kvferry")
    assert explain() == ("acme", 64)
    assert listed()["acme"]["last"]["state"] == "active"


def test_show_imports_it_and_names_its_hooks(fresh_environment, deployment):
    shown = fresh_environment.kvferry("plugins", "show", "acme", cwd=deployment)["plugin"]

    assert shown["state"] == "active"
    assert shown["hooks"] == ["model_defaults", "preferred_transceiver_runtime"]


@pytest.mark.parametrize(
    ("arguments", "variables", "decided_by"),
    [
        (["-p", "no:acme"], {}, "-p no:acme"),
        ([], {"KVFERRY_PLUGINS": ""}, "KVFERRY_PLUGINS"),
        ([], {"KVFERRY_DISABLE_PLUGINS": "acme"}, "KVFERRY_DISABLE_PLUGINS"),
        ([], {"KVFERRY_DISABLE_PLUGIN_AUTOLOAD": "1"}, "KVFERRY_DISABLE_PLUGIN_AUTOLOAD=1"),
    ],
    ids=["flag", "allow-list", "variable", "no autoload"],
)
def test_a_flag_or_a_variable_disables_it(listed, explain, arguments, variables, decided_by):
    acme = listed(*arguments, **variables)["acme"]

    assert (acme["state"], acme["decided_by"]) == ("disabled", decided_by)
    assert explain(*arguments, **variables) == (None, 32)


@pytest.mark.parametrize("where", ["--project", "--user"])
def test_a_kvferry_toml_disables_it_and_enables_it_again(fresh_environment, deployment, listed, explain, where):
    written = fresh_environment.kvferry("plugins", "disable", "acme", where, cwd=deployment)["file"]
    assert (listed()["acme"]["state"], listed()["acme"]["decided_by"]) == ("disabled", written)
    assert explain() == (None, 32)

    fresh_environment.kvferry("plugins", "enable", "acme", where, cwd=deployment)
    assert explain() == ("acme", 64)


def test_the_engine_configuration_disables_it(deployment, listed, explain):
    with (deployment / "engine.yaml").open("a") as file:
        file.write("plugins: {disable: [acme]}\n")

    assert listed("--config", "engine.yaml")["acme"]["decided_by"] == "engine.yaml (plugins)"
    assert explain() == (None, 32)


def test_its_own_tests_pass_there(fresh_environment, tmp_path):
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")

    done = fresh_environment.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 passed" in done.stdout


def test_uninstalling_takes_it_away(fresh_environment, listed, explain):
    fresh_environment.pip("uninstall", "--yes", "acme-kvferry")

    assert "acme" not in listed()
    assert explain() == (None, 32)
