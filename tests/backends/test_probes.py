import pytest

from kvferry.registry.isolation import Call, call_isolated
from kvferry.testing import isolated_registry


@pytest.fixture(scope="module")
def probes():
    return {answer.value.name: answer.value.probe for answer in isolated_registry().transfer_backends()}


@pytest.fixture
def probe(probes, monkeypatch):
    for variable in ("UCX_TLS", "UCX_NET_DEVICES", "NIXL_PLUGIN_DIR"):
        monkeypatch.delenv(variable, raising=False)

    def probe(name):
        (ending,) = call_isolated([Call(probes[name])], timeout=60)
        assert ending.failure is None, (ending.failure, ending.output)
        return ending.value

    return probe


def words(report):
    return "\n".join(f"{problem['what']}; {problem['fix']}" for problem in report["problems"])


@pytest.mark.parametrize("name", ["MOONCAKE", "MPI", "NIXL", "UCX"])
def test_every_probe_reports_in_the_one_shape(probe, name):
    report = probe(name)

    assert set(report) - {"memory"} == {"usable", "library", "transports", "problems"}
    assert report["usable"] or report["problems"]
    assert report["library"] or not report["usable"]
    assert all(isinstance(name, str) for name in report["transports"])
    assert all(set(problem) == {"what", "fix"} for problem in report["problems"])


def test_nixl_starts_an_agent_on_ucx(probe):
    report = probe("NIXL")

    assert report["usable"], words(report)
    assert report["library"].startswith("nixl ")
    assert report["transports"] == ["UCX"]
    assert "host" in report["memory"]


def test_nixl_without_tcp_says_which_variable_is_to_blame(probe, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "posix,self")

    report = probe("NIXL")

    assert not report["usable"]
    assert "UCX_TLS='posix,self': add tcp" in words(report)


def test_nixl_that_finds_no_plugin_is_not_usable(probe, monkeypatch, tmp_path):
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))

    assert not probe("NIXL")["usable"]


def test_ucx_makes_a_worker_and_names_its_transports(probe):
    report = probe("UCX")

    assert report["usable"], words(report)
    assert report["library"].startswith("ucx 1.")
    assert {"self", "tcp"} <= set(report["transports"])
    assert "host" in report["memory"]


@pytest.mark.parametrize("transports", ["self", "", "no_such_transport"])
def test_ucx_that_reaches_no_other_process_is_not_usable(probe, monkeypatch, transports):
    monkeypatch.setenv("UCX_TLS", transports)

    report = probe("UCX")

    assert not report["usable"]
    assert "UCX_TLS" in words(report)


def test_what_ucx_itself_complains_about_is_passed_on(probe, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "self,tcp,no_such_transport")
    monkeypatch.setenv("UCX_TLSS", "tcp")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")

    report = probe("UCX")

    assert report["usable"]
    assert "UCX says: transport 'no_such_transport' is not available" in words(report)
    assert "unused environment variable: UCX_TLSS (maybe: UCX_TLS?)" in words(report)
