import pytest

from kvferry.config.nearest import did_you_mean, nearest


@pytest.mark.parametrize(
    ("name", "names", "meant"),
    [
        ("ucx", ["MPI", "UCX"], "UCX"),
        ("tokens_per_blok", ["max_tokens", "tokens_per_block"], "tokens_per_block"),
        ("runtime", ["backend", "transceiver_runtime"], "transceiver_runtime"),
        ("zzzzzz", ["backend", "transceiver_runtime"], None),
        ("a", [], None),
    ],
)
def test_the_name_that_was_meant_is_found(name, names, meant):
    assert nearest(name, names) == meant


def test_nothing_is_asked_where_nothing_is_near():
    assert did_you_mean("zzzzzz", ["backend"]) == ""
