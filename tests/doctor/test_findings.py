from kvferry.doctor.findings import Area, Finding, Severity, count, in_order, together


def finding(area, severity, subject="x"):
    return Finding(area, severity, subject, "is odd", "it is so", "mend it")


def test_they_are_sorted_by_area_then_the_worst_first_and_said_once():
    fine = finding(Area.BACKENDS, Severity.OK)
    bad = finding(Area.BACKENDS, Severity.ERROR)
    late = finding(Area.WORKER, Severity.ERROR)

    assert in_order([late, fine, bad, fine]) == [bad, fine, late]


def test_what_two_subjects_have_alike_is_said_once():
    one, other = (finding(Area.BACKENDS, Severity.WARNING, name) for name in ("NIXL", "UCX"))
    worse = finding(Area.BACKENDS, Severity.ERROR, "UCX")

    assert [each.subject for each in together([one, worse, other])] == ["NIXL, UCX", "UCX"]
    assert together([one]) == [one]


def test_all_severities_are_counted():
    counts = count([finding(Area.FILES, Severity.ERROR), finding(Area.FILES, Severity.OK)])

    assert counts == {Severity.ERROR: 1, Severity.WARNING: 0, Severity.INFO: 0, Severity.OK: 1}


def test_it_reads_as_a_paragraph():
    assert str(finding(Area.FILES, Severity.INFO, "the file")) == "the file: is odd; it is so; mend it"
