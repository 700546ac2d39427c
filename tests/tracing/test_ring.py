import threading

from hypothesis import given
from hypothesis import strategies as st

from kvferry.tracing.perfetto import write_events
from kvferry.tracing.ring import ENGINE, TraceRing, events_of
from kvferry_plugins.errors import PeerLostError
from kvferry_plugins.types import Role, TransferEvent


def written(ring, folder, read_trace):
    path = folder / "trace.json"
    write_events(events_of(ring.entries(), process=7, process_name="a worker"), path, dropped=ring.dropped)
    return read_trace(path)


def test_the_newest_entries_stay_and_the_others_are_counted():
    ring = TraceRing(capacity=10)
    for number in range(25):
        ring.add(ENGINE, number, "decode", float(number), number + 1.0)
    assert [entry.key for entry in ring.entries()] == list(range(15, 25))
    assert ring.dropped == 15


def test_nothing_is_dropped_of_an_empty_ring():
    assert (TraceRing().dropped, TraceRing().entries()) == (0, [])


def test_threads_may_add_while_others_read():
    ring = TraceRing(capacity=100)

    def add():
        for number in range(5000):
            ring.add(ENGINE, number, "decode", 0.0, 1.0)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(ring.entries()) <= 100
    assert ring.dropped >= 15_000 - 100 - 3  # numbers of threads may cross


def test_steps_of_the_engine_are_one_thread_and_name_their_request(tmp_path, read_trace):
    ring = TraceRing()
    ring.add(ENGINE, 3, "prefill", 10.0, 10.5)
    (event,) = written(ring, tmp_path, read_trace)
    assert (event["ph"], event["ts"], event["dur"], event["tid"]) == ("X", 10_000_000.0, 500_000.0, 1)
    assert event["args"] == {"request": 3}


def test_a_hand_off_is_its_waiting_its_bytes_and_its_chunks(tmp_path, read_trace):
    ring = TraceRing()
    times = {"started": 1.0, "posted": 2.0, "ended": 4.0, "arrivals": ((3.0, 50), (3.5, 90))}
    ring.transfer(TransferEvent(5, Role.GENERATION, "completed", "peer", 100, 2, 1.0, 2.0, **times))
    events = written(ring, tmp_path, read_trace)
    begun = [(event["name"], event["ts"] / 1e6) for event in events if event["ph"] == "b"]
    ended = [(event["name"], event["ts"] / 1e6) for event in events if event["ph"] == "e"]
    assert begun == [("transfer", 1.0), ("control", 1.0), ("wire", 2.0), ("chunk", 2.0), ("chunk", 3.0)]
    assert ended == [("control", 2.0), ("chunk", 3.0), ("chunk", 3.5), ("wire", 4.0), ("transfer", 4.0)]
    assert events[0]["args"] == {"request": 5, "role": "generation", "outcome": "completed", "bytes": 100, "blocks": 2}


def test_a_failed_hand_off_says_with_what_and_holds_no_free_text(tmp_path, read_trace):
    ring = TraceRing()
    error = PeerLostError("the peer at 10.0.0.1 is gone")
    times = {"started": 1.0, "posted": 2.0, "ended": 2.0}
    ring.transfer(TransferEvent(5, Role.CONTEXT, "failed", "peer", 0, 0, 1.0, 0.0, error, **times))
    events = written(ring, tmp_path, read_trace)
    assert events[0]["args"]["error"] == "PeerLostError"
    assert "10.0.0.1" not in (tmp_path / "trace.json").read_text()


MOMENTS = st.integers(0, 20).map(float)


@given(st.lists(st.tuples(st.sampled_from(["request", "transfer"]), st.integers(0, 2), MOMENTS, st.none() | MOMENTS)))
def test_whatever_overlaps_is_drawn_without_crossing(tmp_path_factory, read_trace, entries):
    ring = TraceRing()
    for track, key, start, seconds in entries:
        ring.add(track, key, "span", start, None if seconds is None else start + seconds)
    events = written(ring, tmp_path_factory.mktemp("trace"), read_trace)
    assert sum(event["ph"] in "bn" for event in events) == len(entries)
