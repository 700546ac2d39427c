import json
import sys

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main

VERBS = (["transfer"], ["idle"])


@pytest.fixture
def without_torch(monkeypatch):
    """As on a machine where it is not installed: find_spec finds nothing."""
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_missing_library_is_an_error_that_says_what_to_install(without_torch, verb):
    result = CliRunner().invoke(main, ["bench", *verb])
    assert result.exit_code == 1
    assert "backend NIXL needs torch, not installed here; pip install 'kvferry[nixl]'" in result.stderr
    assert "an error of its own" not in result.stderr


def test_a_missing_library_is_told_as_json_too(without_torch):
    result = CliRunner().invoke(main, ["bench", "transfer", "--json"])
    (error,) = json.loads(result.stdout)["errors"]
    assert error["type"] == "BackendUnavailableError"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_a_runtime_that_is_not_there_yet_starts_no_process(verb):
    result = CliRunner().invoke(main, ["bench", *verb, "--runtime", "CPP"])
    assert result.exit_code == 1
    assert "runtime CPP needs kvferry_native" in result.stderr
