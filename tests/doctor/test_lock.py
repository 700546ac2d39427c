import pytest
from registry.wheels import plugin_source, write_wheel

from kvferry.doctor.findings import Severity
from kvferry.doctor.lock import lock_findings
from kvferry.registry.discovery import discover
from kvferry.registry.lock_file import make_lock, write_lock
from kvferry.registry.plugin_set import FilesReader, known_plugins
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Toggles, flag_layers


@pytest.fixture
def site(tmp_path):
    """One distribution, laid out as a wheel is."""
    import zipfile

    files = {"acme_kvferry.py": plugin_source()}
    with zipfile.ZipFile(write_wheel(tmp_path, "acme-kvferry", "1.0", {"acme": "acme_kvferry"}, files)) as wheel:
        wheel.extractall(tmp_path / "site")
    return tmp_path / "site"


def found(site, folder, *flags):
    discovery = discover([str(site)])
    selection = survey(discovery, Toggles(flag_layers(flags)))
    return list(lock_findings(discovery, selection, {"HOME": str(folder)}, folder))


@pytest.fixture
def locked(site, tmp_path):
    discovery = discover([str(site)])
    plugins = known_plugins(survey(discovery, Toggles()).records, FilesReader(discovery))
    write_lock(tmp_path / "kvferry.lock", make_lock(plugins))
    return tmp_path


def test_without_a_lock_there_is_nothing_to_say(site, tmp_path):
    assert found(site, tmp_path) == []


def test_a_set_that_is_as_locked_is_fine(site, locked):
    (finding,) = found(site, locked)
    assert (finding.severity, finding.what) == (Severity.OK, "its 1 plugin(s) are as locked")


def test_a_plugin_that_differs_is_a_warning_with_what_to_do(site, locked):
    (site / "acme_kvferry.py").write_text("")
    (finding,) = found(site, locked)
    assert (finding.severity, finding.subject, finding.distribution) == (Severity.WARNING, "acme", "acme-kvferry 1.0")
    assert "acme_kvferry.py changed since the installation" in finding.what
    assert finding.fix.startswith("pip install --force-reinstall")

    (finding,) = found(site, locked, "no:acme")
    assert "disabled here by -p no:acme" in finding.what


def test_a_lock_that_cannot_be_read_is_a_warning(site, locked):
    (locked / "kvferry.lock").write_text("version = 2\n")
    (finding,) = found(site, locked)
    assert (finding.severity, finding.subject) == (Severity.WARNING, "kvferry.lock")
    assert "is a lock of version 2" in finding.what
    assert "kvferry plugins lock" in finding.fix
