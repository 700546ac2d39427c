import json
import sys

import pytest
from click.testing import CliRunner

import kvferry.bench.idle
from kvferry.cli.main import main
from kvferry_plugins.errors import KvferryError

VERBS = (["transfer"], ["idle"], ["gil"])
SMALL = ("--bytes", "1MiB", "--rounds", "1", "--blocks", "16")


@pytest.fixture
def without(monkeypatch):
    """As on a machine where a module is not installed: find_spec finds nothing."""

    def remove(module):
        monkeypatch.setitem(sys.modules, module, None)

    return remove


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


def answer(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_missing_library_is_an_error_that_says_what_to_install(without, verb):
    without("torch")
    result = run(*verb)
    assert result.exit_code == 1
    assert "backend NIXL needs torch, not installed here; pip install 'kvferry[nixl]'" in result.stderr
    assert "an error of its own" not in result.stderr


def test_a_missing_library_is_told_as_json_too(without):
    without("torch")
    (error,) = json.loads(run("transfer", "--json").stdout)["errors"]
    assert error["type"] == "BackendUnavailableError"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_runtime_that_is_not_installed_starts_no_process(without, verb):
    without("kvferry_native")
    result = run(*verb, "--runtime", "CPP")
    assert result.exit_code == 1
    assert "runtime CPP needs kvferry_native" in result.stderr
    assert "…" not in result.stderr


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_pair_that_no_plugin_declares_is_wrong_input(verb):
    result = run(*verb, "--backend", "UCX", "--runtime", "PYTHON")
    assert result.exit_code == 2
    assert "UCX" in result.stderr


def test_a_chart_without_its_library_is_refused_before_anything_starts(without, tmp_path):
    without("matplotlib")
    result = run("transfer", "--chart", str(tmp_path / "chart.png"))
    assert result.exit_code == 1
    assert result.stderr == "kvferry: --chart needs matplotlib, not installed here; pip install 'kvferry[bench]'\n"


def test_a_chart_of_another_format_is_refused_before_anything_starts(tmp_path):
    result = run("transfer", "--chart", str(tmp_path / "chart.gif"))
    assert result.exit_code == 2
    assert "FILE.png or FILE.svg" in result.stderr
    assert "…" not in result.stderr


def test_another_backend_to_compare_with_must_be_there():
    result = run("transfer", "--against", "UCXX")
    assert result.exit_code == 2
    assert "no plugin declares backend 'UCXX'" in result.stderr


def test_one_that_fails_costs_only_its_own_figures(monkeypatch):
    def measure(pairing, seconds):
        if pairing.runtime == "CPP":
            raise KvferryError("it did not start")
        return {"context": 0.01, "generation": 0.02}

    monkeypatch.setattr(kvferry.bench.idle, "measure", measure)
    result = run("idle", "--runtime", "CPP", "--runtime", "PYTHON", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [row["runtime"] for row in found["idle"]] == ["PYTHON"]
    assert [error["message"] for error in found["errors"]] == ["it did not start"]


def test_hand_offs_alternate_with_every_raw_tool_and_a_memcpy(tmp_path):
    chart = tmp_path / "chart.svg"
    found = answer("transfer", *SMALL, "--backend", "UCX", "--against", "NIXL", "--chart", str(chart))
    (transfer,) = found["transfers"]
    assert (transfer["runtime"], transfer["backend"], transfer["blocks"]) == ("CPP", "UCX", 16)
    assert set(transfer["raw"]) == {"spinning target", "napping target"}
    assert set(transfer["against"]["NIXL"]) == {"progress thread", "polled"}
    ours, memcpy = transfer["in_order"], transfer["memcpy"]["whole"]
    assert ours["ratio_to_memcpy"] == pytest.approx(memcpy["median_seconds"] / ours["median_seconds"])
    assert ours["ratio_to_others"]["NIXL"] > 0
    assert transfer["one_block"]["ratio"] > 0
    assert found["chart"] == str(chart)
    assert "CPP over UCX" in chart.read_text()


def test_the_spinner_is_measured_in_both_places_and_without_the_lock_with_python_over_nixl_beside():
    found = answer("gil", *SMALL, "--backend", "UCX", "--hand-offs", "3", "--window", "2")
    asked, beside = found["gil"]
    assert (asked["runtime"], asked["backend"]) == ("CPP", "UCX")
    assert (beside["runtime"], beside["backend"]) == ("PYTHON", "NIXL")
    for kind in ("stream", "single"):
        rates = asked[kind]["gigabytes_per_second"]
        assert asked[kind]["ratio"] == pytest.approx(rates["same process"] / rates["other process"])
        assert asked[kind]["ratio_to_control"] == pytest.approx(rates["same process"] / rates["same process, no lock"])


def test_idle_shares_are_told_by_pair_and_role():
    (row,) = answer("idle", "--backend", "UCX", "--seconds", "1")["idle"]
    assert (row["runtime"], row["backend"]) == ("CPP", "UCX")
    assert all(0 <= row["share_of_a_core"][role] < 1 for role in ("context", "generation"))
