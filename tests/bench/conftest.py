import pytest

from kvferry.bench.measurement import Measurement, Plan, Series
from kvferry.bench.pairings import Pairing


@pytest.fixture
def measured():
    """A measurement of 1,000 bytes whose ways took what is given, in seconds."""

    def make(
        *, raw=(), against=(), memcpy=1.0, memcpy_of_pieces=1.0, in_order=2.0, shuffled=4.0, blocks=10, backend="UCX"
    ):
        plan = Plan(Pairing("CPP", backend), 1000, blocks, 1, 2026)
        parts = {"control": 0.25, "planning": None, "posting": 0.5, "wire": 1.0}

        def ways(seconds):
            return {way: Series([each]) for way, each in dict(seconds).items()}

        return Measurement(
            plan,
            ways(raw),
            ways(raw),
            {name: ways(seconds) for name, seconds in dict(against).items()},
            Series([memcpy]),
            Series([memcpy_of_pieces]),
            Series([in_order], [parts]),
            Series([shuffled], [parts]),
            Series([3.0], [parts]),
            Series([0.5]),
        )

    return make
