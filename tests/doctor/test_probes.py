import time
from dataclasses import replace

import pytest

from kvferry.doctor.deployment import Deployment
from kvferry.doctor.findings import Severity
from kvferry.doctor.probes import probe_findings, run_probes
from kvferry.registry.discovery import discover
from kvferry.registry.inspection import inspect_plugins
from kvferry.registry.records import Origin
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Toggles

ERROR, WARNING, INFO, OK = Severity.ERROR, Severity.WARNING, Severity.INFO, Severity.OK


@pytest.fixture
def inspected(install, tmp_path, monkeypatch):
    install("odd_probes", "absent_backend")
    monkeypatch.setenv("ODD_PROBES_PID_FILE", str(tmp_path / "pid"))
    records = [each for each in survey(discover(), Toggles()).records if each.name in ("odd_probes", "absent_backend")]
    return inspect_plugins(records, timeout=20)


@pytest.fixture
def probe(inspected):
    def probe(backend, *, deployment=Deployment(), timeout=20.0):  # noqa: B008 - it is frozen
        (probed,) = run_probes(inspected, only=backend, timeout=timeout)
        return list(probe_findings([probed], deployment))

    return probe


def test_a_backend_that_works_says_with_what(probe):
    (finding,) = probe("FINE")

    assert (finding.severity, finding.subject, finding.what) == (OK, "FINE", "works, with libfine 1.2: wire")
    assert (finding.plugin, finding.distribution) == ("odd_probes", "odd-probes 0.3")


def test_one_that_works_with_a_problem_is_ok_and_a_warning(probe):
    assert [(each.severity, each.what, each.fix) for each in probe("HALF")] == [
        (OK, "works, with libfine 1.2: wire", ""),
        (WARNING, "the second wire is loose", "plug it in"),
    ]


def test_one_that_cannot_work_is_an_error_with_its_reason(probe):
    (finding,) = probe("UNUSABLE")

    assert (finding.severity, finding.what, finding.fix) == (ERROR, "no wire", "buy")
    assert finding.cause == "the shop is closed (wait)"


def test_two_copies_of_ucx_in_one_process_are_seen_where_they_are_loaded(probe, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("wheel", "system")]
    for folder in folders:
        folder.mkdir()
        (folder / "libucp.so.0").write_text("as good as a library, for who looks at names")
    monkeypatch.setenv("ODD_PROBES_UCX_FOLDERS", ":".join(map(str, folders)))

    works, finding = probe("TWO_COPIES")

    assert (works.severity, finding.severity) == (OK, WARNING)
    assert f"loads 2 copies of UCX into one process: {folders[1]}/libucp.so.0, {folders[0]}" in finding.what


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("CRASH", "its probe was killed by signal 11 (SIGSEGV)"),
        ("LEAVE", "its probe ended Python with 5"),
        ("SYSEXIT", "its probe called sys.exit('enough')"),
        ("THROW", "its probe raised RuntimeError: no such device ← OSError: ENODEV"),
        ("MISSHAPEN", "its probe answered ['usable'], and a ProbeReport is a mapping"),
        ("NO_LIST", "its probe answered no ProbeReport: 'transports' is {<object"),
        ("NO_JSON", "which is no JSON"),
    ],
)
def test_whatever_a_probe_does_instead_is_a_finding_about_its_plugin(probe, backend, words):
    (finding,) = probe(backend)

    assert finding.severity is ERROR
    assert words in finding.what
    assert (finding.plugin, finding.distribution) == ("odd_probes", "odd-probes 0.3")
    assert "odd-probes 0.3" in finding.fix


def test_whoever_brought_a_broken_plugin_by_a_flag_is_told_of_the_flag(inspected):
    (probed,) = run_probes(inspected, only="THROW", timeout=20)
    record = replace(probed.record, origin=Origin.INJECTED, distribution="(injected)")

    (finding,) = probe_findings([replace(probed, record=record)], Deployment())

    assert finding.fix == "mend odd_probes, or leave its -p out"


def test_megabytes_on_both_streams_do_not_spoil_an_answer(probe):
    assert [each.severity for each in probe("CHATTER")] == [OK]


def test_a_hang_ends_at_its_deadline_with_the_child_it_had(probe, tmp_path, has_gone):
    started = time.monotonic()

    (finding,) = probe("HANG", timeout=2.0)

    assert "did not end within 2 s" in finding.what
    assert time.monotonic() - started < 15
    assert has_gone(int((tmp_path / "pid").read_text()))


def test_several_run_at_a_time_and_each_is_reported(inspected):
    started = time.monotonic()

    probed = run_probes(inspected, timeout=4.0)

    assert time.monotonic() - started < 15
    findings = list(probe_findings(probed, Deployment()))
    assert {each.subject for each in findings} == {each.declared.name for each in probed}
    assert len([each for each in findings if each.severity is OK]) == 3  # fine, half, chatter


def test_only_the_backend_of_the_plan_must_work(probe):
    assert probe("CRASH", deployment=Deployment("FINE"))[0].severity is WARNING
    assert probe("CRASH", deployment=Deployment("CRASH"))[0].severity is ERROR


def test_an_absent_library_is_no_error_unless_the_backend_was_asked_for(inspected, probe):
    (finding,) = probe("ABSENT")
    assert (finding.severity, finding.fix) == (ERROR, "pip install kvferry-no-such-module")

    everything = [each for each in run_probes(inspected, timeout=1.0) if each.declared.name == "ABSENT"]
    (finding,) = probe_findings(everything, Deployment())
    assert finding.severity is INFO
