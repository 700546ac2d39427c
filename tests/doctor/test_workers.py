import copy

import pytest

from kvferry.doctor.findings import Severity
from kvferry.doctor.workers import difference_findings, worker_findings

ERROR, WARNING, INFO, OK = Severity.ERROR, Severity.WARNING, Severity.INFO, Severity.OK
ADDRESS = "http://127.0.0.1:8000"
STATUS = {
    "role": "context",
    "ready": True,
    "draining": False,
    "plan": {"transceiver": {"runtime": "PYTHON", "backend": "NIXL"}, "warnings": []},
    "plugins": {"nixl": "kvferry 0.1.0"},
    "observers": {"acme": {"told": 9, "raised": 0, "dropped": 0}},
    "engine": {"alive": True},
    "transceiver": {
        "endpoint": "tcp://127.0.0.1:4000",
        "loop_alive": True,
        "ledger": {"blocks": {"source": 3, "destination": 0, "quarantine": 0}, "entries": []},
        "counters": {"handshakes": 4, "bytes_sent": 10},
        "outcomes": {"context": {"completed": 3}},
        "peers": [{"address": "tcp://127.0.0.1:4001", "state": "open", "heard_seconds_ago": 0.1, "warnings": []}],
    },
}


@pytest.fixture
def status():
    return copy.deepcopy(STATUS)


def found(status, **known):
    return [(each.severity, each.what) for each in worker_findings(status, ADDRESS, **known)]


def test_a_healthy_worker_is_ok(status):
    assert found(status) == [(OK, "is a context worker, ready: PYTHON on NIXL")]


@pytest.mark.parametrize("part", ["transceiver", "engine"])
def test_a_dead_loop_is_an_error_and_nothing_else_is_said_of_it(status, part):
    status[part]["loop_alive" if part == "transceiver" else "alive"] = False
    status["ready"] = False

    ((severity, what),) = found(status)

    assert severity is ERROR
    assert "is dead" in what


def test_a_worker_that_is_not_ready_is_an_error_and_one_that_drains_is_not(status):
    status["ready"] = False
    status["not_ready"] = "the other worker has ended"
    (finding,) = worker_findings(status, ADDRESS)
    assert (finding.severity, finding.what, finding.cause) == (ERROR, "is not ready", status["not_ready"])

    status["draining"] = True
    assert found(status) == [(INFO, "is draining: it takes no new request")]


def test_blocks_in_quarantine_are_named_with_what_frees_them(status):
    entry = {"request_id": 7, "owner": "quarantine", "blocks": 5, "seconds": 61.2, "freed_by": "CANCELLED"}
    status["transceiver"]["ledger"] = {"blocks": {"quarantine": 5}, "entries": [entry]}

    finding = list(worker_findings(status, ADDRESS))[1]

    assert (finding.severity, finding.what) == (WARNING, "5 block(s) are in quarantine")
    assert "request 7: 5 for 61 s, freed by CANCELLED" in finding.cause


def test_its_counters_its_observers_and_its_peers_are_looked_at(status):
    status["plan"]["warnings"] = ["backend MPI is deprecated"]
    status["transceiver"]["counters"] |= {"malformed_messages": 2, "internal_errors": 0}
    status["transceiver"]["outcomes"]["context"]["failed"] = 1
    status["observers"]["acme"]["dropped"] = 4
    status["transceiver"]["peers"][0] |= {"state": "silent", "heard_seconds_ago": 12.6, "warnings": ["versions differ"]}

    assert found(status)[1:] == [
        (WARNING, "its plan: backend MPI is deprecated"),
        (WARNING, "has counted 2 malformed messages"),
        (INFO, "1 of 4 transfers failed, as context"),
        (WARNING, "the observer acme lost news: dropped 4 of 9"),
        (WARNING, "has not heard of its peer at tcp://127.0.0.1:4001 for 13 s"),
        (WARNING, "differs from its peer at tcp://127.0.0.1:4001: versions differ"),
    ]


def test_a_worker_on_loopback_is_not_reached_by_configured_peers(status):
    assert found(status, peers=["tcp://10.0.0.7:9001"])[1][0] is ERROR


def test_a_status_with_less_in_it_will_do(status):
    status["transceiver"] = {"loop_alive": True}
    del status["observers"]

    assert [severity for severity, _ in found(status)] == [OK]


def test_what_a_restart_would_change_is_told(status):
    plan = {"transceiver": {"runtime": "CPP", "backend": "NIXL"}}

    findings = list(difference_findings(status, ADDRESS, plan=plan, plugins={"nixl": "kvferry 0.2.0"}))

    assert [each.what for each in findings] == [
        "runs with runtime PYTHON, and this configuration gives CPP",
        "runs plugin nixl of kvferry 0.1.0, and kvferry 0.2.0 is installed",
    ]
    assert list(difference_findings(status, ADDRESS, plan=None, plugins={"nixl": "kvferry 0.1.0"})) == []


@pytest.mark.parametrize(("runs", "number"), [("sha256:1", 0), ("sha256:2", 1), (None, 0)])
def test_a_worker_that_runs_other_files_of_the_same_version_is_told(status, runs, number):
    status["transceiver"]["fingerprint"] = {"fields": {"plugins.digest": {"nixl": runs} if runs else {}}}
    plugins, digests = {"nixl": "kvferry 0.1.0"}, {"nixl": "sha256:1"}

    found = list(difference_findings(status, ADDRESS, plan=None, plugins=plugins, digests=digests))

    assert [each.what for each in found] == [
        "runs plugin nixl of kvferry 0.1.0 with other files than are installed"
    ] * number
