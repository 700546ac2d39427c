import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvferry import whole_files
from kvferry.cli.main import main

BUILTIN = ("gemma", "llama", "mistral", "qwen")


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def switch(verb, name):
    return CliRunner().invoke(main, ["plugins", verb, name, "--project"])


@pytest.mark.parametrize("verb", ["enable", "disable"])
@pytest.mark.parametrize("contents", [b"\xff\xfe", b"a = " + b"[" * 3000, b"[plugins"], ids=["bytes", "deep", "cut"])
def test_a_file_that_cannot_be_read_is_named_and_stays(project, verb, contents):
    file = project / "kvferry.toml"
    file.write_bytes(contents)
    result = switch(verb, "llama")
    assert result.exit_code == 2
    assert f"{file} cannot be read as TOML" in result.stderr
    assert file.read_bytes() == contents


def test_where_no_file_can_be_nothing_is_left(project):
    (project / "kvferry.toml").mkdir()
    result = switch("disable", "llama")
    assert result.exit_code == 2
    assert f"{project / 'kvferry.toml'} cannot be written" in result.stderr
    assert [each.name for each in project.iterdir()] == ["kvferry.toml"]


def test_a_link_that_leads_nowhere_is_replaced(project):
    (project / "kvferry.toml").symlink_to(project / "kvferry.toml")
    result = switch("disable", "llama")
    assert result.exit_code == 0, result.stderr
    assert "llama" in (project / "kvferry.toml").read_text()


def test_the_ends_of_lines_stay(project):
    file = project / "kvferry.toml"
    file.write_bytes(b"# ours\r\n[plugins]\r\ndisable = [\r\n  'gemma', # why\r\n]\r\n")
    assert switch("disable", "llama").exit_code == 0
    assert file.read_bytes().startswith(b"# ours\r\n[plugins]\r\ndisable = [\r\n  'gemma', # why\r\n")


def test_switches_at_the_same_time_are_all_written(project):
    command = [sys.executable, "-m", "kvferry", "plugins", "disable", "--project"]
    started = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in BUILTIN]
    assert [each.wait(120) for each in started] == [0] * len(BUILTIN)
    text = (project / "kvferry.toml").read_text()
    assert [name for name in BUILTIN if name not in text] == []


def test_who_waits_for_another_writer_in_vain_is_told(project, monkeypatch):
    monkeypatch.setattr(whole_files, "WAIT_SECONDS", 0.1)
    with whole_files.one_writer(project / "kvferry.toml"):
        result = switch("disable", "llama")
    assert result.exit_code == 2
    assert f"another process has been writing {project / 'kvferry.toml'}" in result.stderr


@pytest.mark.parametrize("arguments", [["plugins", "list"], ["plugins", "lock"], ["explain"]], ids=" ".join)
def test_a_working_folder_that_is_gone_is_said(project, arguments):
    (project / "gone").mkdir()
    command = "import os, sys; os.rmdir(os.getcwd()); from kvferry.cli.main import main; main(sys.argv[1:])"
    result = subprocess.run(
        [sys.executable, "-P", "-c", command, *arguments],
        cwd=project / "gone",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert "the working folder is not there any more" in result.stderr
