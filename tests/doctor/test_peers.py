import pytest

from kvferry.doctor.findings import Severity
from kvferry.doctor.hosts import host_of, is_loopback, is_unspecified
from kvferry.doctor.peers import peer_findings

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


@pytest.mark.parametrize(
    ("peers", "bound_to", "expected"),
    [
        ([], None, []),
        ([], "tcp://127.0.0.1:9", []),
        (["tcp://10.0.0.7:9001"], None, [(INFO, "listens on loopback, which is the default")]),
        (["tcp://10.0.0.7:9001"], "tcp://127.0.0.1:4", [(ERROR, "its control socket is on tcp://127.0.0.1:4")]),
        (["tcp://10.0.0.7:9001"], "tcp://10.0.0.6:4", []),
        (["tcp://localhost:9001"], None, [(WARNING, "on loopback")]),
        (["tcp://[::1]:9001"], "tcp://127.0.0.1:4", [(WARNING, "on loopback")]),
        (["tcp://0.0.0.0:9001"], "tcp://10.0.0.6:4", [(ERROR, "where one can listen and not connect")]),
    ],
)
def test_peers_that_are_not_reached_or_do_not_reach_us(peers, bound_to, expected):
    findings = list(peer_findings(peers, bound_to=bound_to))

    assert [each.severity for each in findings] == [severity for severity, _ in expected]
    assert all(words in each.what for each, (_, words) in zip(findings, expected, strict=True))


@pytest.mark.parametrize(
    ("endpoint", "host", "loopback", "unspecified"),
    [
        ("tcp://127.0.0.2:1", "127.0.0.2", True, False),
        ("tcp://LocalHost:1", "localhost", True, False),
        ("tcp://[::1]:1", "::1", True, False),
        ("tcp://[fe80::1%eth0]:1", "fe80::1", False, False),
        ("tcp://[::]:1", "::", False, True),
        ("tcp://*:1", "*", False, True),
        ("tcp://gpu-7:1", "gpu-7", False, False),
        ("tcp://[broken", "", False, False),
    ],
)
def test_hosts(endpoint, host, loopback, unspecified):
    assert (host_of(endpoint), is_loopback(endpoint), is_unspecified(endpoint)) == (host, loopback, unspecified)
