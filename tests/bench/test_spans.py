import pytest

from kvferry.bench.spans import PARTS, Span, exposed_seconds, read_spans, seconds_by_part


def test_parts_are_summed_over_their_spans_and_others_are_left_out():
    spans = [
        Span("prefill", 0.0, 1.0, "context"),
        Span("prefill", 1.0, 1.5, "context"),
        Span("wire", 0.5, 2.0, "generation"),
        Span("decode", 2.0, 9.0, "generation"),
    ]

    assert seconds_by_part(spans) == {**dict.fromkeys(PARTS, 0.0), "prefill": 1.5, "wire": 1.5}


def test_what_is_exposed_lies_between_the_last_prefill_and_the_attached_request():
    spans = [Span("prefill", 0.0, 1.0, "context"), Span("prefill", 1.0, 2.0, "context")]

    assert exposed_seconds(spans) is None
    assert exposed_seconds([*spans, Span("attach", 2.2, 2.25, "generation")]) == pytest.approx(0.25)


def test_a_worker_s_timeline_is_read_with_its_figures():
    (span,) = read_spans([{"name": "prefill", "start": 1.0, "end": 3.0, "tokens": 256}], "context")

    assert span == Span("prefill", 1.0, 3.0, "context", {"tokens": 256})
    assert span.seconds == 2.0
