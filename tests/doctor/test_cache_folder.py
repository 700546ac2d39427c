import pytest

from kvferry.doctor.cache_folder import cache_folder_findings
from kvferry.doctor.findings import Severity


def found(path, size=1000):
    return list(cache_folder_findings({"disk_cache_size": size, "disk_cache_path": str(path)}))


def test_a_folder_with_room_is_nothing_to_speak_of(tmp_path):
    assert found(tmp_path) == []


@pytest.mark.parametrize("config", [{}, {"disk_cache_size": 0, "disk_cache_path": "/absent"}])
def test_without_a_disk_tier_no_folder_is_looked_at(config):
    assert list(cache_folder_findings(config)) == []


def test_a_missing_folder_is_found_with_the_command(tmp_path):
    (finding,) = found(tmp_path / "absent")
    assert finding.severity is Severity.WARNING
    assert finding.subject == "kv_cache_config.disk_cache_path"
    assert "no existing folder" in finding.what
    assert finding.fix == f"mkdir -p {tmp_path / 'absent'}"


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert "no existing folder" in found(tmp_path / "file")[0].what


def test_a_folder_that_cannot_be_written_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may run as root, who may write anywhere
    (finding,) = found(tmp_path)
    assert "cannot write" in finding.what


def test_a_disk_with_less_room_than_configured_is_found_with_the_figures(tmp_path):
    (finding,) = found(tmp_path, size=1 << 60)
    assert finding.subject == "kv_cache_config.disk_cache_size"
    assert str(1 << 60) in finding.what
