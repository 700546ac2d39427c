import json

from click.testing import CliRunner

from kvferry.cli.main import main


def run(*arguments):
    result = CliRunner().invoke(main, ["bench", "resolve", "--rounds", "1", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_installation_is_decided_and_list_imports_no_plugin():
    few = ("--distributions", "0", "--distributions", "3", "--plugins", "1", "--plugins", "12")
    found = json.loads(run(*few, "--json"))
    cases = [(each["distributions"], each["plugins"]) for each in found["cases"]]
    assert cases == [(0, 0), (3, 0), (0, 1), (0, 12)]
    assert all(each["list_imports"] == [] for each in found["cases"])
    assert [each["answered"] for each in found["cases"]] == ["CPP", "CPP", "PYTHON", "PYTHON"]
    assert all(each["resolve_seconds"] > 0 and each["explain_seconds"] > 0 for each in found["cases"])
    assert set(found["growth"]) >= {"resolve_microseconds_a_plugin_and_hook", "list_microseconds_a_distribution"}


def test_people_get_a_table_and_what_one_more_costs():
    told = run("--distributions", "0", "--plugins", "1")
    assert "plugins list" in told
    assert "µs a plugin and hook" in told
