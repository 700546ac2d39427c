import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from importlib_metadata import PathDistribution
from registry.wheels import pip_install, plugin_source, write_project, write_wheel

from kvferry.registry.module_files import find_module
from kvferry.registry.plugin_files import files_of_distribution, files_of_module

COMMAND = "[console_scripts]\nacme = acme_kvferry:main\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """What pip leaves of a wheel, and of an editable install."""
    folder = tmp_path_factory.mktemp("installed")
    files = {"acme_kvferry/__init__.py": plugin_source(), "acme_kvferry/table.json": "{}"}
    wheel = write_wheel(folder, "acme-kvferry", "1.0", {"acme": "acme_kvferry"}, files, COMMAND)
    project = write_project(folder / "apex", "apex-kvferry", "2.0", "apex", plugin_source())
    pip_install(folder / "wheel", wheel)
    pip_install(folder / "editable", editable=project)
    return folder


@pytest.fixture
def copy(installed, tmp_path):
    """A copy that a test may change; the wheel's, and its distribution."""
    shutil.copytree(installed / "wheel", tmp_path / "site")
    return tmp_path / "site"


def read(site):
    return files_of_distribution(PathDistribution(next(iter(Path(site).glob("*.dist-info")))))


def test_the_files_that_a_wheel_s_record_names_are_read(installed):
    files = read(installed / "wheel")

    assert (files.count, files.editable, files.altered, files.missing) == (5, False, (), ())


def test_what_the_installer_adds_does_not_count(installed, copy):
    before = read(copy)

    metadata = copy / "acme_kvferry-1.0.dist-info"
    (metadata / "INSTALLER").write_text("another\n")
    (metadata / "REQUESTED").unlink()
    (metadata / "direct_url.json").unlink()
    (copy / "acme_kvferry" / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc").unlink()
    (copy / "bin" / "acme").write_text("#!/another/python\n")
    os.utime(copy / "acme_kvferry" / "table.json", (0, 0))

    assert read(copy) == before == read(installed / "wheel")


def test_a_changed_file_changes_the_digest_and_is_named(copy):
    before = read(copy)

    with (copy / "acme_kvferry" / "__init__.py").open("a") as file:
        file.write("# one more line\n")

    after = read(copy)
    assert after.digest != before.digest
    assert after.altered == ("acme_kvferry/__init__.py",)


def test_two_files_that_change_places_change_the_digest(copy):
    before = read(copy)
    package = copy / "acme_kvferry"

    (package / "__init__.py").rename(package / "other")
    (package / "table.json").rename(package / "__init__.py")
    (package / "other").rename(package / "table.json")

    assert read(copy).digest != before.digest


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), os.mkfifo], ids=["gone", "dir", "fifo"])
def test_a_recorded_file_that_cannot_be_read_is_named(copy, make):
    path = copy / "acme_kvferry" / "table.json"
    before = read(copy)
    path.unlink()

    make(path)

    assert read(copy).missing == ("acme_kvferry/table.json",)
    assert read(copy).digest != before.digest


@pytest.mark.parametrize("line", [".,,", "..,,", "a\0b,,", '"', "/,,", ",,"])
def test_a_record_with_a_strange_line_is_read_all_the_same(copy, line):
    with (copy / "acme_kvferry-1.0.dist-info" / "RECORD").open("a") as file:
        file.write(f"{line}\n")

    assert read(copy).count >= 5


def test_without_a_record_the_sources_count(copy):
    (copy / "acme_kvferry-1.0.dist-info" / "RECORD").unlink()
    before = read(copy)
    assert (before.editable, before.count, before.missing) == (True, 4, ())

    (copy / "acme_kvferry" / "more.py").write_text("")

    assert read(copy).digest != before.digest


def test_of_an_editable_install_the_sources_count_wherever_they_are(installed, tmp_path):
    before = read(installed / "editable")
    assert before.editable
    assert before.missing == ()

    shutil.copytree(installed / "editable", tmp_path / "site")
    shutil.copytree(installed / "apex", tmp_path / "moved")
    next(iter((tmp_path / "site").glob("*.pth"))).write_text(str(tmp_path / "moved"))
    assert read(tmp_path / "site") == before

    (tmp_path / "moved" / "apex_kvferry" / "more.py").write_text("")
    assert read(tmp_path / "site").digest != before.digest


def test_a_module_that_shadows_the_installed_one_counts(copy, tmp_path, monkeypatch):
    before = read(copy)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "acme_kvferry.py").write_text("")
    monkeypatch.syspath_prepend(str(copy))
    assert read(copy) == before

    monkeypatch.syspath_prepend(str(tmp_path / "first"))

    assert read(copy).digest != before.digest


def test_a_module_without_a_distribution_is_its_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lone_plugin.py").write_text("1")
    before = files_of_module("lone_plugin")
    (tmp_path / "lone_plugin.py").write_text("2")

    assert before.count == 1
    assert files_of_module("lone_plugin").digest != before.digest
    assert files_of_module("kvferry_no_such_module") is None
    assert files_of_module("FakeModelPlugin('A')") is None


def test_a_package_in_a_namespace_is_found_without_importing_anything(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "acme_space" / "inner"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit")
    (package / "plugin.py").write_text("raise SystemExit")
    (tmp_path / "acme_space" / "another_s.py").write_text("")

    found = find_module("acme_space.inner.plugin", ())

    assert [path.relative_to(found.folder).as_posix() for path in found.files] == [
        "acme_space/inner/__init__.py",
        "acme_space/inner/plugin.py",
    ]
    assert "acme_space" not in sys.modules


def test_our_own_plugins_are_read_without_importing_one():
    script = (
        "import sys\n"
        "from kvferry.registry.locking import survey_files\n"
        "from kvferry.registry.toggles import Toggles\n"
        "assert survey_files(Toggles()).lock().plugins\n"
        "heavy = ('torch', 'zmq', 'nixl', 'kvferry_backends', 'kvferry_models_plugins')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
