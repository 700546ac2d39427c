import pytest

from kvferry.doctor.findings import Severity
from kvferry.doctor.ucx_copies import Copy, copies_findings, find_copies, nixl_versions, version_findings


@pytest.fixture
def site(tmp_path):
    """A folder of packages as wheels lay them out: two bring a UCX, one does not."""
    for file in ("nixl_cu12.libs/libucp-b39b.so.0.0.0", "libucx/lib/libucp.so.0", "other/lib/libother.so"):
        (tmp_path / "site" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / file).touch()
    return tmp_path / "site"


def of_wheels(copies):
    return sorted(copy.owner for copy in copies if copy.is_in_a_wheel)


def test_wheels_that_bring_one_are_found_by_their_files(site):
    assert of_wheels(find_copies([str(site)], {})) == ["libucx", "nixl_cu12"]


def test_a_path_twice_or_of_no_folder_counts_nothing_twice(site):
    assert of_wheels(find_copies([str(site), str(site), "/nowhere"], {})) == ["libucx", "nixl_cu12"]


def test_a_folder_of_ld_library_path_is_a_copy_of_its_own(site, tmp_path):
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt" / "libucs.so.0").touch()
    environ = {"LD_LIBRARY_PATH": f"/nowhere::{tmp_path / 'opt'}:{site / 'libucx' / 'lib'}"}

    copies = [copy for copy in find_copies([str(site)], environ) if copy.owner == "LD_LIBRARY_PATH"]

    assert copies == [Copy("LD_LIBRARY_PATH", str(tmp_path / "opt"))]


def test_several_that_lie_beside_each_other_are_by_design():
    copies = [Copy("libucx", "/a", is_in_a_wheel=True), Copy("the system", "/usr/lib")]

    (finding,) = copies_findings(copies, {}, {})

    assert (finding.severity, finding.what) == (Severity.INFO, "is here 2 times: libucx, the system (/usr/lib)")


def test_one_is_nothing_to_speak_of():
    assert list(copies_findings([Copy("libucx", "/a", is_in_a_wheel=True)], {}, {})) == []


def test_another_one_on_ld_library_path_is_a_warning():
    (finding,) = copies_findings([Copy("LD_LIBRARY_PATH", "/opt/ucx/lib")], {}, {})

    assert finding.severity is Severity.WARNING
    assert "/opt/ucx/lib" in finding.what


@pytest.mark.parametrize(
    "value", ["/opt/ucx/lib/libucp.so.0", "libjemalloc.so:/x/libucs.so", "libuct.so.0.0.0 libx.so"]
)
def test_a_preloaded_one_is_in_every_process(value):
    (finding,) = copies_findings([], {"LD_PRELOAD": value}, {})

    assert (finding.severity, finding.subject) == (Severity.WARNING, "LD_PRELOAD")


def test_another_library_may_be_preloaded():
    assert list(copies_findings([], {"LD_PRELOAD": "libjemalloc.so.2"}, {})) == []


def test_a_plugin_that_imports_rapids_ucx_is_named():
    imported = {"acme": frozenset({"ucxx", "numpy"}), "healthy": frozenset({"numpy"})}

    (finding,) = copies_findings([], {}, imported)

    assert (finding.severity, finding.plugin) == (Severity.WARNING, "acme")
    assert "imports ucxx" in finding.what


def test_wheels_of_nixl_that_differ_are_a_warning():
    (finding,) = version_findings({"nixl": "1.5.1", "nixl-cu12": "1.4.0"})

    assert "nixl 1.5.1, nixl-cu12 1.4.0" in finding.what
    assert list(version_findings({"nixl": "1.5.1", "nixl-cu12": "1.5.1"})) == []


def test_those_of_this_environment_are_found():
    assert nixl_versions()["nixl"][0].isdigit()
