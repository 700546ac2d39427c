import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main
from kvferry.registry.records import plain_record
from kvferry.testing import isolated_registry
from kvferry_plugins.testing import FakeModelPlugin

BROKEN = ("import_raises", "import_exits", "missing_library", "misspelt_hook", "extra_argument", "no_plugin")


def run(*arguments):
    return CliRunner().invoke(main, ["plugins", *arguments])


def run_json(*arguments, status=0):
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def plugin(name, *arguments):
    (found,) = [each for each in run_json("list", *arguments)["plugins"] if each["name"] == name]
    return found


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_list_works_with_every_plugin_broken(install):
    install(*BROKEN, "twin_one", "twin_two")

    document = run_json("list")

    states = {each["name"]: each["state"] for each in document["plugins"]}
    assert document["ok"]
    assert {name: states[name] for name in BROKEN} == dict.fromkeys(BROKEN, "discovered")
    assert states["twin-one:twin"] == states["twin-two:twin"] == "failed"


def test_list_for_people_shows_names_states_and_why(install):
    install("healthy", "twin_one", "twin_two")

    shown = run("list", "-p", "no:healthy").stdout

    assert "healthy: disabled by -p no:healthy" in shown
    assert "twin-one:twin: the name 'twin' is claimed by twin-two too" in shown


def test_list_shows_the_last_recorded_state_with_its_date(install):
    install("healthy", "import_raises")
    assert plugin("healthy")["last"] is None

    run("show", "healthy")
    run("show", "import_raises")

    assert plugin("healthy")["last"]["state"] == "active"
    assert plugin("healthy")["last"]["date"].startswith("20")
    assert plugin("import_raises")["last"]["state"] == "failed"
    assert "kvferry_no_such_module" in plugin("import_raises")["last"]["reason"]


def test_a_command_that_loads_records_the_states(install):
    install("healthy", "import_raises")

    assert CliRunner().invoke(main, ["explain", "--json"]).exit_code == 0

    assert plugin("healthy")["last"]["state"] == "active"
    assert plugin("import_raises")["last"]["state"] == "failed"


def test_list_names_an_unknown_plugin_and_lists_all_the_same(install):
    install("healthy")

    document = run_json("list", "-p", "healthyy", status=2)

    assert not document["ok"]
    assert "did you mean 'healthy'?" in document["errors"][0]["message"]
    assert "healthy" in [each["name"] for each in document["plugins"]]


def test_list_reads_the_plugins_section_of_a_configuration(install, project):
    install("healthy")
    (project / "engine.yaml").write_text("plugins: {disable: [healthy]}\n")

    assert plugin("healthy", "--config", "engine.yaml")["decided_by"] == "engine.yaml (plugins)"


@pytest.mark.parametrize("text", ["plugins: {disabel: [a]}\n", "plugins: [\n", "- a\n"])
def test_a_configuration_that_is_wrong_is_one_paragraph(project, text):
    (project / "engine.yaml").write_text(text)

    result = run("list", "--config", "engine.yaml")

    assert result.exit_code == 2
    assert "engine.yaml" in result.stderr


def test_an_injected_module_is_listed(project, monkeypatch):
    FakeModelPlugin("A", runtime="CPP", name="flagged").write_module(project)
    monkeypatch.syspath_prepend(str(project))

    found = plugin("flagged", "-p", "module:flagged")

    assert (found["origin"], found["distribution"], found["state"]) == ("injected", "(injected)", "discovered")


def test_list_says_which_layer_decided_and_who_demands_what(install, project):
    install("healthy")
    (project / "kvferry.toml").write_text(
        '[plugins]\ndisable = ["gemma"]\nrequired = ["nixl"]\n[plugins.prefer]\nA = "healthy"\n'
    )

    document = run_json("list", "-p", "no:qwen")
    shown = run("list", "-p", "no:qwen").stdout

    path = str(project / "kvferry.toml")
    layers = {each["name"]: each["layer"] for each in document["plugins"]}
    assert (layers["gemma"], layers["qwen"], layers["llama"]) == ("project", "flag", None)
    assert [(each["layer"], each["source"]) for each in document["layers"]] == [
        ("project", path),
        ("flag", "-p no:qwen"),
    ]
    assert document["required"] == [{"name": "nixl", "by": path}]
    assert document["prefer"] == {"A": {"plugin": "healthy", "by": path}}
    assert re.search(r"^gemma +disabled +project file ", shown, re.MULTILINE)
    assert re.search(r"^llama +discovered +default ", shown, re.MULTILINE)
    assert f"nixl: required by {path}" in shown
    assert f"healthy: preferred for A by {path}" in shown


def test_list_probe_imports_each_aside_and_says_how_it_came_out(install):
    install("healthy", "import_raises", "several")

    document = run_json("list", "--probe", "-p", "no:several", status=1)

    states = {each["name"]: each["state"] for each in document["plugins"]}
    assert [states[name] for name in ("healthy", "import_raises", "several", "several_more", "nixl")] == [
        *("active", "failed", "disabled", "active", "active")
    ]
    assert "healthy_plugin" not in sys.modules
    assert "kvferry_no_such_module" in run("list", "--probe").stdout


# --- beside a running worker -----------------------------------------------------------------------------------------


@pytest.fixture
def worker_status(monkeypatch):
    """A worker's answer without a worker: what it runs with is put together here."""

    def answer(**changes):
        records = [plain_record(record) for record in isolated_registry(builtin_models=True).records()]
        records = [
            {**record, **changes.get(record["name"], {})}
            for record in records
            if changes.get(record["name"], {}) is not None
        ]
        monkeypatch.setattr("kvferry.cli.running_worker.ask_status", lambda address: {"plugin_records": records})

    return answer


def test_list_worker_marks_what_differs(install, worker_status):
    install("healthy")
    worker_status(
        nixl={"version": "0.0.9"}, qwen={"state": "disabled", "reason": "by KVFERRY_DISABLE_PLUGINS"}, glm=None
    )

    document = run_json("list", "--worker", "127.0.0.1:1")
    shown = run("list", "--worker", "127.0.0.1:1").stdout

    told = {each["name"]: each["differences"] for each in document["plugins"] if each["differences"]}
    assert told == {
        "glm": ["the worker does not know it"],
        "healthy": ["the worker does not know it"],
        "nixl": ["version 0.1.0 here, 0.0.9 in the worker"],
        "qwen": ["on here, disabled in the worker by KVFERRY_DISABLE_PLUGINS"],
    }
    (llama,) = [each for each in document["plugins"] if each["name"] == "llama"]
    assert llama["worker"]["state"] == "active"
    assert re.search(r"^nixl .*0\.0\.9 +version 0\.1\.0 here, 0\.0\.9 in the worker", shown, re.MULTILINE)


def test_what_only_the_worker_has_is_listed_too(worker_status, monkeypatch):
    worker_status(nixl={"name": "gone", "distribution": "gone-kvferry"})

    (gone,) = [each for each in run_json("list", "--worker", "127.0.0.1:1")["plugins"] if each["name"] == "gone"]

    assert (gone["state"], gone["differences"]) == (None, ["not here"])


def test_a_worker_that_is_not_there_is_one_paragraph():
    result = run("list", "--worker", "127.0.0.1:1")

    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


# --- show ----------------------------------------------------------------------------------------------------------


def test_show_imports_in_another_process_and_names_hooks_and_time(install):
    install("healthy")

    shown = run_json("show", "healthy")["plugin"]

    assert shown["state"] == "active"
    assert shown["hooks"] == ["preferred_transceiver_runtime"]
    assert shown["import_seconds"] > 0
    assert shown["entry_point"] == "healthy_plugin"
    assert (shown["distribution"], shown["version"], shown["origin"]) == ("healthy-kvferry", "0.1", "external")
    assert "healthy_plugin" not in sys.modules


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("import_raises", "ModuleNotFoundError: No module named 'kvferry_no_such_module'"),
        ("import_exits", "sys.exit(3)"),
        ("misspelt_hook", "did you mean 'preferred_transceiver_runtime'?"),
        ("kills_python", "killed by signal 9"),
    ],
)
def test_show_tells_how_a_plugin_fails(install, name, word):
    install(name)

    document = run_json("show", name, status=1)

    assert document["plugin"]["state"] == "failed"
    assert word in document["errors"][0]["message"]
    assert word in run("show", name).stdout


def test_show_does_not_import_a_disabled_plugin(install):
    install("kills_python")

    shown = run_json("show", "kills_python", "-p", "no:kills_python")["plugin"]

    assert (shown["state"], shown["decided_by"]) == ("disabled", "-p no:kills_python")


def test_show_of_an_unknown_name_suggests_the_nearest(install):
    install("healthy")

    result = run("show", "healthyy")

    assert result.exit_code == 2
    assert "did you mean 'healthy'?" in result.stderr


def test_show_names_rank_what_it_brings_and_who_demands_it(install, project):
    (project / "kvferry.toml").write_text('[plugins]\nrequired = ["nixl"]\n')

    document = run_json("show", "nixl", "-p", "nixl")["plugin"]
    shown = run("show", "nixl", "-p", "nixl").stdout

    assert (document["rank"], document["layer"], document["decided_by"]) == ("injected", "flag", "-p nixl")
    assert document["declares"] == [{"kind": "backend", "name": "NIXL", "missing": []}]
    assert "brings:       backend NIXL" in shown
    assert f"required by {project / 'kvferry.toml'}" in shown


def test_show_keeps_the_last_failure_and_its_chain(install, tmp_path, monkeypatch):
    package = tmp_path / "mended"
    (package / "mended-1.dist-info").mkdir(parents=True)
    (package / "mended-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mended\nVersion: 1\n")
    (package / "mended-1.dist-info" / "entry_points.txt").write_text("[kvferry]\nmended = mended_plugin\n")
    monkeypatch.syspath_prepend(str(package))
    source = package / "mended_plugin.py"
    source.write_text(
        "try:\n    import kvferry_gone\nexcept ImportError as error:\n    raise RuntimeError('no') from error\n"
    )
    assert run("show", "mended").exit_code == 1
    FakeModelPlugin("A", runtime="CPP", name="mended_plugin").write_module(package)

    shown = run("show", "mended").stdout

    assert re.search(r"^state: +active$", shown, re.MULTILINE)
    assert re.search(r"^last failure: +20.*mended 1, import: ", shown, re.MULTILINE)
    assert "  ModuleNotFoundError: No module named 'kvferry_gone'" in shown


def test_show_of_a_distribution_shows_its_only_plugin_or_lists_all(install):
    install("healthy", "several")

    assert run_json("show", "healthy-kvferry")["plugin"]["name"] == "healthy"
    assert "'several' or 'several_more'" in run("show", "several:*").stderr


# --- enable and disable --------------------------------------------------------------------------------------------


def test_disable_and_enable_write_the_users_file_where_there_is_no_project(install, project):
    install("healthy")
    path = os.path.join(os.environ["XDG_CONFIG_HOME"], "kvferry", "kvferry.toml")

    assert run("disable", "healthy").stdout == f"disabled healthy: wrote {path}\n"
    assert plugin("healthy")["decided_by"] == path
    assert run("enable", "healthy").stdout == f"enabled healthy: wrote {path}\n"
    assert plugin("healthy")["state"] == "discovered"
    assert list(project.iterdir()) == []


def test_the_nearest_project_file_is_written_and_the_rest_of_it_stays(install, project, monkeypatch):
    install("healthy")
    before = '# ours\n[plugins]\nrequired = ["llama"]  # always\n'
    (project / "kvferry.toml").write_text(before)
    (project / "deep").mkdir()
    monkeypatch.chdir(project / "deep")

    document = run_json("disable", "healthy")

    assert document["file"] == str(project / "kvferry.toml")
    assert (project / "kvferry.toml").read_text() == before + 'disable = ["healthy"]\n'


def test_project_makes_a_file_here_and_user_writes_the_users(install, project):
    install("healthy")

    assert run_json("disable", "healthy", "--project")["file"] == str(project / "kvferry.toml")
    assert run_json("disable", "healthy", "--user")["file"].startswith(os.environ["XDG_CONFIG_HOME"])


def test_switching_twice_changes_nothing_more(install):
    install("healthy")

    assert [run_json("disable", "healthy")["changed"] for _ in range(2)] == [True, False]
    assert [run_json("enable", "healthy")["changed"] for _ in range(2)] == [True, False]


def test_enabling_over_a_lower_layer_names_the_plugin(install, project):
    install("healthy")
    run("disable", "healthy", "--user")

    assert [run_json("enable", "healthy", "--project")["changed"] for _ in range(2)] == [True, False]

    assert plugin("healthy")["decided_by"] == str(project / "kvferry.toml")
    assert plugin("healthy")["state"] == "discovered"


def test_a_switch_that_a_higher_layer_overrules_says_so(install, monkeypatch):
    install("healthy")
    monkeypatch.setenv("KVFERRY_DISABLE_PLUGINS", "healthy")

    (warning,) = run_json("enable", "healthy")["warnings"]

    assert "KVFERRY_DISABLE_PLUGINS decides" in warning


def test_one_of_two_twins_is_enabled_by_its_distribution(install):
    install("twin_one", "twin_two")
    assert "'twin-one:twin' or 'twin-two:twin'" in run("enable", "twin").stderr

    run("enable", "twin-one:twin")

    assert plugin("twin-one:twin")["state"] == "discovered"
    assert plugin("twin-two:twin")["state"] == "failed"


def test_a_distribution_is_switched_as_a_whole(install, project):
    install("several", "healthy")
    run("disable", "several_more", "--project")

    document = run_json("disable", "several:*", "--project")

    assert (document["plugin"], document["plugins"]) == ("Several:*", ["several", "several_more"])
    assert (project / "kvferry.toml").read_text() == '[plugins]\ndisable = ["Several:*"]\n'
    assert run("enable", "several_more").exit_code == 0
    assert [plugin(name)["state"] for name in ("several", "several_more")] == ["disabled", "discovered"]
    assert run("enable", "several:*").exit_code == 0
    assert [plugin(name)["state"] for name in ("several", "several_more")] == ["discovered", "discovered"]
    assert (project / "kvferry.toml").read_text() == "[plugins]\n"


def test_a_plugin_is_enabled_though_the_file_disables_its_distribution_in_another_spelling(install, project):
    install("healthy")
    (project / "kvferry.toml").write_text('[plugins]\ndisable = ["Healthy_KVferry"]  # why\n')

    assert run("enable", "healthy").exit_code == 0

    assert "Healthy_KVferry" not in (project / "kvferry.toml").read_text()
    assert plugin("healthy")["state"] == "discovered"


def test_our_own_distribution_cannot_be_switched(project):
    result = run("disable", "kvferry", "--project")

    assert result.exit_code == 2
    assert "name its plugins one by one" in result.stderr
    assert list(project.iterdir()) == []


def test_switching_an_unknown_plugin_is_an_error_and_writes_nothing(project):
    result = run("disable", "lama", "--project")

    assert result.exit_code == 2
    assert "did you mean 'llama'?" in result.stderr
    assert list(project.iterdir()) == []


def test_a_plugin_that_is_gone_can_be_taken_out_of_the_disabled(project):
    (project / "kvferry.toml").write_text('[plugins]\ndisable = ["gone"]\n')

    assert run("enable", "gone").exit_code == 0
    assert "gone" not in (project / "kvferry.toml").read_text()


@pytest.mark.parametrize("text", ["[plugins\n", "plugins = 3\n"])
def test_a_spoilt_file_is_reported_and_left_alone(project, text):
    (project / "kvferry.toml").write_text(text)

    result = run("disable", "llama")

    assert result.exit_code == 2
    assert "kvferry.toml" in result.stderr
    assert (project / "kvferry.toml").read_text() == text


def test_switching_works_with_every_plugin_broken(install):
    install(*BROKEN)

    for name in BROKEN:
        assert run("disable", name).exit_code == 0

    assert {plugin(name)["state"] for name in BROKEN} == {"disabled"}


def test_the_command_itself_lists_a_plugin(install):
    install("healthy")
    command = [sys.executable, "-m", "kvferry.cli.main", "plugins", "list", "--json"]

    document = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert "healthy" in [each["name"] for each in document["plugins"]]
