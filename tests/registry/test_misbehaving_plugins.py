"""Real packages, met by the real command in a process of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from kvferry.registry.guard import FORKED_STATUS

EXPLAIN = ("explain", "--json", "--model", "config.json")


@pytest.fixture
def kvferry(tmp_path, install):
    """Run the command with these packages installed; what it prints on stdout must be one JSON object."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["AcmeForCausalLM"], "torch_dtype": "float16"}))
    (tmp_path / "engine.yaml").write_text("cache_transceiver_config: {backend: NIXL}\n")

    def run(packages, *arguments, status=0, **environ):
        install(*packages)
        command = [sys.executable, "-m", "kvferry.cli.main", *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == status, done.stderr[-3000:]
        return json.loads(done.stdout), done.stderr

    return run


def about(warnings, plugin):
    (warning,) = [each for each in warnings if f"plugin {plugin!r} ({plugin.replace('_', '-')} 0.1)" in each]
    return warning


def preferred(document):
    (decision,) = [each for each in document["decisions"] if each["setting"].endswith("transceiver_runtime")]
    return decision["value"], decision["by"]


CONFIGURED = (*EXPLAIN, "--config", "engine.yaml")


def test_megabytes_printed_at_import_are_counted_cut_and_kept_out_of_the_answer(kvferry):
    document, errors = kvferry(["prints_at_import"], *CONFIGURED)

    assert re.search(r"its import prints 7,\d{3},\d{3} characters", about(document["warnings"], "prints_at_import"))
    assert preferred(document) == ("PYTHON", "prints_at_import")
    assert "a line to standard output" in errors
    assert len(errors) < 20_000


def test_what_an_import_changes_in_the_process_is_told_and_put_back(kvferry):
    document, _ = kvferry(["changes_process"], *CONFIGURED, KVFERRY_TEST_KEPT="1")

    warning = about(document["warnings"], "changes_process")
    for change in (
        "changes the environment: ACME_HOME, KVFERRY_TEST_KEPT (put back)",
        "changes the working folder to '/' (put back)",
        "changes sys.path: '/acme/lib'",
        "handles signals: SIGINT, SIGTERM (put back)",
        "changes the locale to",
        "changes the filters of warnings (put back)",
        "replaces sys.excepthook (put back)",
        "replaces sys.stdout or sys.stderr (put back)",
        "configures the root logger",
    ):
        assert change in warning
    assert preferred(document) == ("PYTHON", "changes_process")


def test_a_child_that_is_forked_at_import_is_ended_there(kvferry):
    document, errors = kvferry(["forks_at_import", "healthy"], *CONFIGURED)

    assert "its import forks 1 time(s) (the child was ended)" in about(document["warnings"], "forks_at_import")
    assert "a second command" not in errors
    assert FORKED_STATUS not in (0, 1, 2)


def test_threads_and_processes_that_an_import_starts_are_told_and_keep_no_command_from_ending(kvferry):
    document, _ = kvferry(["starts_threads"], *CONFIGURED)

    warning = about(document["warnings"], "starts_threads")
    assert "starts 1 thread(s): acme-poller" in warning
    (process,) = re.findall(r"starts 1 process\(es\): (\d+)", warning)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(process), signal.SIGKILL)


def test_an_import_that_hangs_is_interrupted_and_named_with_where_it_was(kvferry):
    document, _ = kvferry(["hangs_at_import", "healthy"], *CONFIGURED, KVFERRY_PLUGIN_IMPORT_SECONDS="1")

    (warning,) = [each for each in document["warnings"] if "hangs_at_import" in each]
    assert "hangs_at_import (hangs-at-import 0.1) is failed" in warning
    assert "did not end within 1 s; it was in " in warning
    assert "hangs_at_import_plugin.py:3" in warning
    assert preferred(document) == ("PYTHON", "healthy")


def test_what_cannot_be_interrupted_is_named_by_a_watchdog(install, tmp_path):
    install("cannot_be_stopped")
    environ = {**os.environ, "KVFERRY_PLUGIN_IMPORT_SECONDS": "0.5"}
    command = [sys.executable, "-m", "kvferry.cli.main", "explain"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
        finally:
            process.kill()

    assert "the import of plugin 'cannot_be_stopped' (cannot-be-stopped 0.1) has not ended within 0.5 s" in line
    assert "kvferry plugins disable" in line


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(kvferry, text):
    document, _ = kvferry(["healthy"], *CONFIGURED, status=2, KVFERRY_PLUGIN_IMPORT_SECONDS=text)

    assert "KVFERRY_PLUGIN_IMPORT_SECONDS" in document["errors"][0]["message"]


# --- hooks -----------------------------------------------------------------------------------------------------------


def test_what_a_hook_prints_is_told_and_kept_out_of_the_answer(kvferry):
    document, errors = kvferry(["odd_hooks"], *CONFIGURED, ODD_HOOK="prints")

    warning = about(document["warnings"], "odd_hooks")
    assert re.search(r"its hook preferred_transceiver_runtime prints 1,95\d,\d{3} characters", warning)
    assert len(errors) < 20_000


def test_a_hook_that_blocks_is_interrupted_and_named(kvferry):
    document, _ = kvferry(["odd_hooks"], *CONFIGURED, status=2, ODD_HOOK="blocks", KVFERRY_PLUGIN_IMPORT_SECONDS="1")

    (error,) = document["errors"]
    assert error["type"] == "HookError"
    assert "plugin 'odd_hooks' (odd-hooks 0.1): its hook preferred_transceiver_runtime did not end" in error["message"]


@pytest.mark.parametrize("odd", ["runtime", "defaults", "keys", "value", "endless", "raises"])
def test_megabytes_in_an_answer_are_cut_in_what_is_said_of_it(kvferry, odd):
    document, errors = kvferry(["odd_hooks"], *CONFIGURED, status=2, ODD_HOOK=odd)

    assert "odd_hooks" in document["errors"][0]["message"]
    assert len(json.dumps(document)) + len(errors) < 60_000


# --- the verbs that look at plugins ----------------------------------------------------------------------------------

ODD = ("prints_at_import", "changes_process", "forks_at_import", "hangs_at_import")


def test_show_tells_how_an_import_behaves(kvferry):
    document, _ = kvferry(["forks_at_import"], "plugins", "show", "forks_at_import", "--json")

    assert document["plugin"]["state"] == "active"
    assert document["plugin"]["conduct"] == ["forks 1 time(s) (the child was ended)"]


def test_list_probe_names_every_one_of_them(kvferry):
    document, _ = kvferry(ODD, "plugins", "list", "--probe", "--json", status=1, KVFERRY_PLUGIN_IMPORT_SECONDS="3")

    found = {each["name"]: each for each in document["plugins"]}
    assert [found[name]["state"] for name in ODD] == ["active", "active", "active", "failed"]
    assert all(found[name]["conduct"] for name in ODD[:3])
    assert "did not end within 3 s" in found["hangs_at_import"]["reason"]


def test_list_imports_none_of_them(kvferry):
    document, errors = kvferry((*ODD, "kills_python"), "plugins", "list", "--json")

    assert {each["state"] for each in document["plugins"]} == {"discovered"}
    assert errors == ""
