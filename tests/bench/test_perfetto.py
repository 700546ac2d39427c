import json

import pytest

from kvferry.bench.perfetto import TracedRequest, write_trace
from kvferry.bench.spans import Span
from kvferry_plugins.errors import ConfigError


@pytest.fixture
def requests():
    spans = (
        Span("prefill", 10.0, 10.5, "context", {"tokens": 256}),
        Span("wire", 10.25, 10.75, "generation"),
        Span("control", 10.25, 10.5, "generation"),
    )
    return [TracedRequest("plain", spans), TracedRequest("pipelined", spans[:1])]


def events_of(path):
    return json.loads(path.read_text())["traceEvents"]


def test_every_span_is_a_complete_event_in_microseconds_from_the_first(requests, tmp_path):
    write_trace(requests, tmp_path / "trace.json")

    complete = [event for event in events_of(tmp_path / "trace.json") if event["ph"] == "X"]

    assert [(event["name"], event["ts"], event["dur"]) for event in complete] == [
        ("prefill", 0.0, 500_000.0),
        ("wire", 250_000.0, 500_000.0),
        ("control", 250_000.0, 250_000.0),
        ("prefill", 0.0, 500_000.0),
    ]
    assert complete[0]["args"] == {"tokens": 256}


def test_ways_are_processes_and_workers_are_threads_with_names(requests, tmp_path):
    write_trace(requests, tmp_path / "trace.json")

    events = events_of(tmp_path / "trace.json")
    named = {(event["name"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    tracks = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}

    assert named == {
        ("process_name", "plain"),
        ("process_name", "pipelined"),
        ("thread_name", "context"),
        ("thread_name", "generation"),
    }
    assert len(tracks) == 3


def test_a_file_that_cannot_be_written_is_a_clear_error(requests, tmp_path):
    with pytest.raises(ConfigError, match="cannot write the trace to"):
        write_trace(requests, tmp_path / "absent" / "trace.json")
