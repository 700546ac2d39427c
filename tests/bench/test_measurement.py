import json

from kvferry.bench.measurement import Series, labelled


def test_throughputs_are_compared_with_the_best_raw_way(measured):
    found = measured(raw={"slow": 3.0, "fast": 1.5}).to_json()
    assert found["best_raw"] == "fast"
    assert found["in_order"]["ratio_to_raw"] == 0.75
    assert found["shuffled"]["ratio_to_raw"] == 0.375


def test_what_is_shuffled_is_compared_with_a_memcpy_of_the_same_pieces(measured):
    found = measured(memcpy=1.0, memcpy_of_pieces=3.0).to_json()
    assert found["in_order"]["ratio_to_memcpy"] == 0.5
    assert found["shuffled"]["ratio_to_memcpy"] == 0.75


def test_other_backends_raw_tools_have_ratios_of_their_own(measured):
    found = measured(raw={"way": 1.0}, against={"NIXL": {"polled": 3.0, "thread": 5.0}}).to_json()
    assert found["against"]["NIXL"]["polled"]["median_seconds"] == 3.0
    assert found["in_order"]["ratio_to_others"] == {"NIXL": 1.5}


def test_a_backend_without_a_raw_tool_is_measured_all_the_same(measured):
    found = measured().to_json()
    assert found["best_raw"] is None
    assert found["in_order"]["ratio_to_raw"] is None
    assert found["one_block"]["ratio"] is None
    assert json.loads(json.dumps(found)) == found


def test_a_part_that_nobody_knows_apart_is_none(measured):
    assert measured().to_json()["in_order"]["parts_seconds"]["planning"] is None


def test_one_block_is_compared_with_a_raw_write_and_a_round_trip(measured):
    assert measured(raw={"way": 1.0}).one_block_ratio == 2.0


def test_every_way_has_a_label_of_its_own(measured):
    labels = [label for label, _ in labelled(measured(raw={"a": 1.0, "b": 2.0}, against={"NIXL": {"a": 1.0}}))]
    assert labels[:3] == ["raw, a (best)", "raw, b", "raw NIXL, a"]
    assert len(set(labels)) == len(labels) == 7


def test_a_series_keeps_only_what_counts():
    series = Series()
    series.take(lambda: 5.0, counts=False)
    series.take(lambda: 1.0, counts=True)
    assert series.median == 1.0
