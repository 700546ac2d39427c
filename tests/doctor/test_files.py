import json
import os
import sys

import pytest

from kvferry.doctor.files import file_findings, key_findings, state_findings
from kvferry.doctor.findings import Severity
from kvferry.registry.state_file import LastState, last_states
from kvferry.transceiver.keys import load_or_make_key


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "kvferry" / "curve.key"
    load_or_make_key(path)
    return path


def test_a_good_key_is_nothing_to_speak_of(key):
    assert list(key_findings(key)) == []


def test_a_key_that_is_not_there_yet_is_not_made(tmp_path):
    assert list(key_findings(tmp_path / "deep" / "curve.key")) == []
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_others_read_is_an_error_with_the_command(key):
    key.chmod(0o644)

    (finding,) = key_findings(key)

    assert finding.severity is Severity.ERROR
    assert "can be read by others" in finding.what
    assert "chmod 600" in finding.fix


def test_a_spoilt_key_is_an_error(key):
    key.write_text("a b")

    (finding,) = key_findings(key)

    assert "holds no key pair" in finding.what
    assert "delete it" in finding.fix


def test_a_folder_that_others_may_write_is_a_warning(key):
    key.parent.chmod(0o777)

    (finding,) = key_findings(key)

    assert finding.severity is Severity.WARNING
    assert f"chmod go-w {key.parent}" in finding.fix


def test_a_place_that_cannot_hold_a_key_is_an_error(tmp_path):
    (tmp_path / "file").touch()

    (finding,) = key_findings(tmp_path / "file" / "kvferry" / "curve.key")

    assert "no worker starts" in finding.what


def test_states_of_plugins_that_are_gone_are_told(tmp_path):
    states = {"gone": LastState("active", "2026-01-01", "gone 1"), "here": LastState("active", "2026-01-01", "here 1")}

    (finding,) = state_findings(tmp_path / "plugins.json", states, {"here"})

    assert finding.severity is Severity.INFO
    assert finding.what.endswith("any more: gone")


def test_of_many_that_are_gone_the_first_are_named(tmp_path):
    states = {f"gone_{number:03d}": LastState("active", "2026-01-01", "gone 1") for number in range(300)}
    (finding,) = state_findings(tmp_path / "plugins.json", states, set())
    assert finding.what.endswith("gone_000, gone_001, gone_002, gone_003, gone_004 and 295 more")


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"environments": {sys.prefix: 3}})])
def test_a_state_file_that_cannot_be_read_is_a_warning(tmp_path, text):
    path = tmp_path / "plugins.json"
    path.write_text(text)

    (finding,) = state_findings(path, last_states(path), set())

    assert finding.severity is Severity.WARNING


def test_both_are_looked_for_where_workers_look():
    folder = os.path.join(os.environ["XDG_STATE_HOME"], "kvferry")
    os.makedirs(folder)
    for name in ("curve.key", "plugins.json"):
        with open(os.path.join(folder, name), "w") as file:
            file.write("spoilt")

    assert len(file_findings(os.environ, set())) == 2
