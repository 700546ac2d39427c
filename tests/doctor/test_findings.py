from kvferry.doctor.findings import Area, Finding, Severity, count, in_order


def finding(area, severity, subject="x"):
    return Finding(area, severity, subject, "is odd", "it is so", "mend it")


def test_they_are_sorted_by_area_then_the_worst_first_and_said_once():
    fine = finding(Area.BACKENDS, Severity.OK)
    bad = finding(Area.BACKENDS, Severity.ERROR)
    late = finding(Area.WORKER, Severity.ERROR)

    assert in_order([late, fine, bad, fine]) == [bad, fine, late]


def test_all_severities_are_counted():
    counts = count([finding(Area.FILES, Severity.ERROR), finding(Area.FILES, Severity.OK)])

    assert counts == {Severity.ERROR: 1, Severity.WARNING: 0, Severity.INFO: 0, Severity.OK: 1}


def test_it_reads_as_a_paragraph():
    assert str(finding(Area.FILES, Severity.INFO, "the file")) == "the file: is odd; it is so; mend it"
