import json
import os
from pathlib import Path

import pytest

from kvferry.tracing.perfetto import complete, merge, named, require_trace, write_events
from kvferry_plugins.errors import ConfigError

EVENTS = [named("process_name", "one", 1), complete("step", 1.0, 1.5, 1, 1, {"tokens": 3})]


def test_a_trace_is_written_whole_and_says_what_it_lacks(tmp_path, read_trace):
    path = tmp_path / "trace.json"
    write_events(EVENTS, path, dropped=3)
    (event,) = read_trace(path)
    assert (event["name"], event["ts"], event["dur"], event["args"]) == ("step", 1e6, 5e5, {"tokens": 3})
    assert json.loads(path.read_text())["otherData"]["dropped"] == 3
    assert os.listdir(tmp_path) == ["trace.json"]


def test_processes_of_one_host_are_merged_on_their_common_clock(tmp_path, read_trace):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for number, path in enumerate(paths, 1):
        events = [named("process_name", path.stem, number), complete("step", number, number + 1.0, number, 1)]
        write_events(events, path, dropped=number)
    assert merge([*paths, tmp_path / "absent.json"], tmp_path / "both.json") == 4
    assert [(event["pid"], event["ts"]) for event in read_trace(tmp_path / "both.json")] == [(1, 1e6), (2, 2e6)]
    assert json.loads((tmp_path / "both.json").read_text())["otherData"]["dropped"] == 3


@pytest.mark.parametrize("broken", ["", "{", "[1, 2]"], ids=["empty", "cut off", "a list"])
def test_a_source_that_is_no_trace_has_no_event(tmp_path, broken):
    (tmp_path / "a.json").write_text(broken)
    assert merge([tmp_path / "a.json"], tmp_path / "both.json") == 0


def test_a_file_that_cannot_be_written_is_said_before_and_after(tmp_path):
    for refuse in (require_trace, lambda path: write_events(EVENTS, path)):
        with pytest.raises(ConfigError, match="cannot write the trace to"):
            refuse(tmp_path / "absent" / "trace.json")


def test_what_is_no_plain_file_is_written_to_and_not_replaced():
    write_events(EVENTS, Path(os.devnull))
    assert not Path(os.devnull).is_file()
