import json
from dataclasses import replace

import pytest

from kvferry.registry.records import State
from kvferry.registry.state_file import last_states, record_states
from kvferry.testing import isolated_registry


@pytest.fixture
def records():
    return [record for record in isolated_registry().records() if record.name in ("nixl", "mpi")]


def test_states_are_read_back_as_they_were_recorded(tmp_path, records):
    path = tmp_path / "deep" / "plugins.json"

    record_states(path, records)

    states = last_states(path)
    assert {name: state.state for name, state in states.items()} == {record.name: record.state for record in records}
    assert states["nixl"].distribution == records[-1].printed_distribution


def test_another_python_environment_has_states_of_its_own(tmp_path, records):
    record_states(tmp_path / "plugins.json", records, environment="/one")

    assert last_states(tmp_path / "plugins.json", environment="/two") == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99}', '{"schema": 1, "environments": []}', "\x00"])
def test_a_spoilt_file_is_as_good_as_none_and_is_replaced(tmp_path, records, text):
    path = tmp_path / "plugins.json"
    path.write_text(text)

    assert last_states(path) == {}
    record_states(path, records)
    assert json.loads(path.read_text())["schema"] == 1


def test_a_folder_that_cannot_be_written_is_no_matter(tmp_path, records):
    (tmp_path / "file").write_text("")

    record_states(tmp_path / "file" / "plugins.json", records)

    assert last_states(tmp_path / "file" / "plugins.json") == {}


def test_the_last_failure_stays_with_its_whole_chain_after_the_plugin_loads_again(tmp_path, records):
    path = tmp_path / "plugins.json"
    broken = replace(records[0], state=State.FAILED, stage="import", reason="it broke", causes=("A: a", "B: b"))

    record_states(path, [broken])
    record_states(path, [replace(records[0], import_seconds=0.25)])

    last = last_states(path)[broken.name]
    assert (last.state, last.import_seconds) == (records[0].state, 0.25)
    assert (last.failure.causes, last.failure.stage, last.failure.reason) == (("A: a", "B: b"), "import", "it broke")
    assert last.failure.date.startswith("20")


def test_what_a_newer_kvferry_adds_to_a_state_is_left_out(tmp_path, records):
    path = tmp_path / "plugins.json"
    record_states(path, records, environment="/one")
    document = json.loads(path.read_text())
    document["environments"]["/one"]["nixl"]["mood"] = "fine"
    path.write_text(json.dumps(document))

    assert last_states(path, environment="/one")["nixl"].state == records[-1].state
