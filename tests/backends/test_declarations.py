import pkgutil

import pytest

from kvferry.testing import isolated_registry


@pytest.fixture(scope="module")
def backends():
    return {answer.value.name: answer.value for answer in isolated_registry().transfer_backends()}


def test_nixl_runs_under_both_runtimes_and_python_needs_a_finite_timeout(backends):
    support = backends["NIXL"].runtimes
    assert set(support) == {"CPP", "PYTHON"}
    assert support["PYTHON"].needs_finite_timeout
    assert not support["CPP"].needs_finite_timeout


@pytest.mark.parametrize("name", ["UCX", "MPI", "MOONCAKE"])
def test_the_others_run_under_cpp_alone(backends, name):
    assert set(backends[name].runtimes) == {"CPP"}


@pytest.mark.parametrize("name", ["NIXL", "UCX", "MPI", "MOONCAKE"])
def test_each_says_what_it_needs_and_how_to_get_it(backends, name):
    backend = backends[name]
    assert backend.requires
    assert backend.install.startswith("pip install ")
    assert callable(pkgutil.resolve_name(backend.probe))


def test_all_managers_are_driven_by_all_backends(backends):
    assert all(support.managers is None for backend in backends.values() for support in backend.runtimes.values())
