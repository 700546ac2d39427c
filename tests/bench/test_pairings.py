import pytest

from kvferry.bench.pairings import Pairing, asked_pairings, every_pairing, require_usable
from kvferry.bench.transfer import baselines_of
from kvferry_plugins.errors import ConfigError


def test_without_a_runtime_each_backend_takes_its_first():
    assert asked_pairings(["NIXL", "UCX"], []) == [Pairing("PYTHON", "NIXL"), Pairing("CPP", "UCX")]


def test_each_backend_takes_those_runtimes_that_it_declares():
    expected = [Pairing("PYTHON", "NIXL"), Pairing("CPP", "NIXL"), Pairing("CPP", "UCX")]
    assert asked_pairings(["NIXL", "UCX", "NIXL"], ["PYTHON", "CPP"]) == expected


def test_a_runtime_that_a_backend_does_not_declare_is_refused_by_resolution():
    pairings = asked_pairings(["UCX"], ["PYTHON"])
    assert pairings == [Pairing("PYTHON", "UCX")]
    with pytest.raises(ConfigError, match="UCX"):
        require_usable(pairings)


def test_an_unknown_backend_is_told_which_there_are():
    with pytest.raises(ConfigError, match=r"'NIXLL'; there are .*NIXL, UCX"):
        asked_pairings(["NIXLL"], [])


def test_every_pairing_is_usable():
    pairings = every_pairing()
    assert Pairing("PYTHON", "NIXL") in pairings
    require_usable(pairings)


def test_a_backends_own_raw_tool_comes_first():
    assert list(baselines_of(Pairing("CPP", "UCX"), ["NIXL", "UCX"])) == ["UCX", "NIXL"]
