import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from kvferry.cli import main as entry
from kvferry.cli.main import VERBS, main
from kvferry.cli.output import error_items, exit_status, json_option, paragraph, print_json, report_errors
from kvferry_plugins.errors import BackendUnavailableError, ConfigError, HookError, PeerLostError, ResolutionError

HEAVY = ("torch", "nixl", "transformers", "mooncake", "mpi4py", "ucxx", "numpy", "zmq")


def modules_after(*arguments):
    code = (
        "import json, sys\n"
        "from kvferry.cli.main import main\n"
        "main(sys.argv[1:], standalone_mode=False)\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["plugins", "list"], ["plugins", "list", "--json"]], ids=" ".join)
def test_listing_plugins_imports_nothing_heavy_and_no_plugin(arguments):
    modules = modules_after(*arguments)

    assert not modules.intersection(HEAVY)
    assert not [name for name in modules if name.startswith(("kvferry_models_plugins", "kvferry_backends"))]


def test_the_help_imports_no_verb():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvferry.cli.main", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )

    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    assert not imported.intersection({*HEAVY, *(where.partition(":")[0] for where, _ in VERBS.values())})


def test_the_help_lists_every_verb():
    result = CliRunner().invoke(main, ["--help"])

    assert result.exit_code == 0
    assert all(verb in result.output for verb in ("bench", "demo", "explain", "plugins", "worker"))


def test_an_unknown_verb_is_wrong_input():
    result = CliRunner().invoke(main, ["explian"])

    assert result.exit_code == 2
    assert "explian" in result.stderr


def test_the_version_is_the_distributions():
    assert CliRunner().invoke(main, ["--version"]).output.startswith("kvferry 0.")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no"), 2),
        (ResolutionError([ConfigError("no"), ConfigError("nor")]), 2),
        (HookError("no", hook="model_defaults", plugin="acme"), 2),
        (BackendUnavailableError("no"), 1),
        (PeerLostError("no"), 1),
        (ZeroDivisionError("no"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_exit_status_tells_wrong_input_from_a_failure(error, status):
    assert exit_status(error) == status


def failing_verb(error):
    @click.command()
    @json_option
    @report_errors(fields={"plan": None})
    def verb(as_json):
        raise error

    @click.group()
    @click.option("--debug", is_flag=True)
    def group(debug):
        pass

    group.add_command(verb)
    return group


def test_an_error_is_one_paragraph_on_stderr_without_a_traceback():
    result = CliRunner().invoke(failing_verb(ConfigError("a.yaml: x is wrong; write y")), ["verb"])

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "kvferry: a.yaml: x is wrong; write y\n"


def test_debug_adds_the_traceback():
    result = CliRunner().invoke(failing_verb(ConfigError("x is wrong")), ["--debug", "verb"])

    assert "Traceback" in result.stderr
    assert result.stderr.endswith("kvferry: x is wrong\n")


def test_an_error_that_nobody_meant_says_how_to_see_more():
    result = CliRunner().invoke(failing_verb(ZeroDivisionError("by zero")), ["verb"])

    assert result.exit_code == 1
    assert "ZeroDivisionError: by zero" in result.stderr
    assert "--debug" in result.stderr


def test_an_error_under_json_is_one_object_with_every_blocker():
    error = ResolutionError([ConfigError("x", setting="a.b"), ConfigError("y")])

    result = CliRunner().invoke(failing_verb(error), ["verb", "--json"])

    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "schema": 1,
        "ok": False,
        "plan": None,
        "warnings": [],
        "errors": [
            {"type": "ConfigError", "message": "x", "setting": "a.b"},
            {"type": "ConfigError", "message": "y", "setting": None},
        ],
    }
    assert len(error_items(error)) == 2
    assert "2 settings" in paragraph(error)


def test_read_only_values_print_as_json(capsys):
    from kvferry.registry.freezing import freeze

    print_json(freeze({"a": [{"b": {1}}], "c": None}))

    assert json.loads(capsys.readouterr().out) == {"a": [{"b": [1]}], "c": None}


def test_a_verb_that_this_installation_lacks_says_so(monkeypatch):
    monkeypatch.setitem(VERBS, "fly", ("kvferry.cli.no_such_verb:fly", "Fly."))

    result = CliRunner().invoke(entry.main, ["fly"])

    assert result.exit_code == 1
    assert "no verb 'fly'" in result.stderr


def test_what_a_plugin_prints_at_the_end_is_not_in_the_answer(tmp_path, monkeypatch):
    (tmp_path / "parting.py").write_text(
        "import atexit, os\n"
        "from kvferry_plugins import hookimpl\n"
        "atexit.register(print, 'bye', flush=True)\n"
        "atexit.register(os.write, 1, b'bye')\n"
        "@hookimpl\n"
        "def preferred_transceiver_runtime(architecture): return None\n"
    )
    (tmp_path / "engine.yaml").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", "kvferry", "explain", "--config", "engine.yaml", "-p", "parting", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["ok"]
    assert done.stderr.count("bye") == 2
