import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.metrics.families import MAX_LABEL_CHARACTERS, counter, gauge, histogram, info
from kvferry.metrics.figures import BUCKETS, Histogram, TransferFigures
from kvferry_plugins.errors import PeerLostError, TransferError, TransferTimeoutError
from kvferry_plugins.types import Role, TransferEvent

OUTCOMES = ("completed", "failed", "cancelled")


def event(outcome="completed", *, role=Role.CONTEXT, nbytes=10, blocks=1, admission=0.0, transfer=0.0, error=None):
    return TransferEvent(1, role, outcome, "peer", nbytes, blocks, admission, transfer, error)


class StrangeError(TransferError):
    pass


@given(
    st.lists(
        st.builds(
            event,
            st.sampled_from(OUTCOMES),
            role=st.sampled_from(list(Role)),
            nbytes=st.integers(0, 1 << 40),
            blocks=st.integers(0, 1000),
            admission=st.floats(0, 1000),
            transfer=st.floats(0, 1000),
        )
    )
)
def test_every_event_is_in_the_sums_once(events):
    figures = TransferFigures()
    for each in events:
        figures.count(each)
    ends = figures.ends()
    assert sum(each.count for each in ends.values()) == len(events)
    assert sum(each.nbytes for each in ends.values()) == sum(each.nbytes for each in events)
    assert sum(each.blocks for each in ends.values()) == sum(each.blocks for each in events)
    assert sum(each.empty for each in ends.values()) == sum(not each.nbytes for each in events)
    for each in ends.values():
        assert sum(each.transfer.counts) == sum(each.admission.counts) == each.count
    assert sum(figures.failures().values()) == sum(each.outcome == "failed" for each in events)


@given(st.lists(st.floats(0, 1000), min_size=1))
def test_a_histogram_s_buckets_are_cumulative_and_hold_what_is_at_most_their_bound(seconds):
    found = Histogram()
    for each in seconds:
        found.observe(each)
    (family,) = [histogram("seconds", "help", (), {(): found})]
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    for bound in BUCKETS:
        assert buckets[f"{bound:g}"] == sum(each <= bound for each in seconds)
    assert buckets["+Inf"] == len(seconds)


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (TransferError("x"), ("TransferError", "")),
        (PeerLostError("x"), ("PeerLostError", "")),
        (TransferTimeoutError("x", state="waiting"), ("TransferTimeoutError", "waiting")),
        (TransferTimeoutError("x", state="a plugin's own words 4711"), ("TransferTimeoutError", "other")),
        (StrangeError("x"), ("TransferError", "")),
        (RuntimeError("x"), ("other", "")),
        (None, ("other", "")),
    ],
    ids=["transfer", "peer-lost", "timeout", "strange-state", "subclass", "foreign", "none"],
)
def test_causes_are_the_contract_s_classes_and_nothing_else(error, counted):
    figures = TransferFigures()
    figures.count(event("failed", role=Role.GENERATION, error=error))
    assert figures.failures() == {("generation", *counted): 1}


def test_what_was_read_does_not_change_afterwards():
    figures = TransferFigures()
    figures.count(event())
    before = figures.ends()
    figures.count(event())
    assert before["context", "completed"].count == 1
    assert sum(before["context", "completed"].transfer.counts) == 1


def test_labels_are_cut_whatever_they_are_told():
    families = (
        gauge("g", "help", ("name",), {"x" * 500: 1}),
        counter("c", "help", ("name",), {"x" * 500: 1}),
        info("i", "help", [{"name": "x" * 500, "nothing": None}]),
    )
    for family in families:
        (sample,) = family.samples
        assert len(sample.labels["name"]) == MAX_LABEL_CHARACTERS
