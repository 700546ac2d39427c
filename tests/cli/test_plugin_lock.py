"""Sets of plugins that pip installed, against the lock of another: the command, as an operator runs it."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from registry.wheels import pip_install, plugin_source, write_project, write_wheel

from kvferry.cli.main import main

PACKAGES = Path(__file__).parent.parent / "packages"
SOURCE = {"acme_kvferry/__init__.py": plugin_source(), "acme_kvferry/other.py": plugin_source()}
APEX = {"apex_kvferry.py": plugin_source()}


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str

    @property
    def document(self):
        return json.loads(self.stdout)

    def differences(self):
        """Without those of kvferry itself, whose sources somebody may be editing."""
        return [each for each in self.document["differences"] if not each["distribution"].startswith("kvferry ")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run ``kvferry`` in a folder of its own, with these on the path; nothing of a plugin is imported here."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, path=(), **environ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*map(str, path), *sys.path])
            for name, value in environ.items():
                patch.setenv(name, value)
            importlib.invalidate_caches()
            result = CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)
        return Done(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def start(tmp_path):
    """Run ``kvferry`` as a process, as far as plugins are loaded."""

    def start(*arguments, path=(), **environ):
        done = subprocess.run(
            [sys.executable, "-m", "kvferry", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return start


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")

    def wheel(name, version, points, files, place="first"):
        return write_wheel(folder / place, name, version, points, files)

    acme = {"acme": "acme_kvferry"}
    return {
        "acme": wheel("acme-kvferry", "1.0", acme, SOURCE),
        "later": wheel("acme-kvferry", "1.1", acme, SOURCE),
        "rebuilt": wheel(
            "acme-kvferry", "1.0", acme, {**SOURCE, "acme_kvferry/__init__.py": plugin_source("CPP")}, "rebuilt"
        ),
        "renamed": wheel("acme-kvferry", "1.0", {"acme": "acme_kvferry.other"}, SOURCE, "renamed"),
        "apex": wheel("apex-kvferry", "2.0", {"apex": "apex_kvferry"}, APEX),
        "impostor": wheel("impostor", "1.0", {"acme": "impostor_kvferry"}, {"impostor_kvferry.py": plugin_source()}),
    }


@pytest.fixture(scope="module")
def sites(wheels, tmp_path_factory):
    """Name → a folder in which pip installed these, in this order."""
    folder = tmp_path_factory.mktemp("sites")
    sets = {
        "both": ["acme", "apex"],
        "in another order": ["apex", "acme"],
        "later": ["later", "apex"],
        "rebuilt": ["rebuilt", "apex"],
        "renamed": ["renamed", "apex"],
        "apex alone": ["apex"],
        "impostor": ["impostor", "apex"],
        "acme alone": ["acme"],
    }
    installed = {}
    for number, (name, these) in enumerate(sets.items()):
        installed[name] = folder / str(number)
        for group in [[each] for each in these] if "order" in name else [these]:
            pip_install(installed[name], *(wheels[each] for each in group))
    project = write_project(folder / "project", "acme-kvferry", "1.0", "acme", plugin_source())
    installed["editable"] = pip_install(folder / "editable", wheels["apex"], editable=project)
    return installed


@pytest.fixture(scope="module")
def lock(sites, tmp_path_factory):
    """Of the set ``both``."""
    path = tmp_path_factory.mktemp("lock") / "kvferry.lock"
    command = [sys.executable, "-m", "kvferry", "plugins", "lock", "--output", str(path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(sites["both"])}, check=True, capture_output=True)
    return path


def external(document):
    return [each for each in document["plugins"] if each["distribution"] != "kvferry"]


# --- lock ----------------------------------------------------------------------------------------------------------


def test_a_lock_names_distribution_version_entry_point_and_files(run, sites, tmp_path):
    done = run("plugins", "lock", "--json", path=[sites["both"]])

    assert (done.status, done.document["file"]) == (0, str(tmp_path / "kvferry.lock"))
    acme, apex = external(done.document)
    assert (acme["name"], acme["distribution"], acme["version"]) == ("acme", "acme-kvferry", "1.0")
    assert (acme["entry_point"], acme["editable"]) == ("acme_kvferry", False)
    assert acme["digest"].startswith("sha256:")
    assert apex["name"] == "apex"
    assert "kvferry worker --locked" in (tmp_path / "kvferry.lock").read_text()


def test_the_order_of_installation_and_of_the_path_changes_no_byte(run, sites, lock):
    locked = external(run("plugins", "lock", "--json", path=[sites["both"]]).document)
    again = external(run("plugins", "lock", "--json", path=[sites["in another order"]]).document)
    apart = external(run("plugins", "lock", "--json", path=[sites["acme alone"], sites["apex alone"]]).document)
    swapped = external(run("plugins", "lock", "--json", path=[sites["apex alone"], sites["acme alone"]]).document)

    assert locked == again == apart == swapped


def test_the_lock_is_beside_the_project_s_own_file(run, tmp_path, monkeypatch):
    (tmp_path / "kvferry.toml").write_text("")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert run("plugins", "lock").stdout.startswith(f"wrote {tmp_path / 'kvferry.lock'}: ")
    assert run("plugins", "lock").status == 0
    assert list((tmp_path / "below").iterdir()) == []


def test_what_is_disabled_is_not_locked_and_what_p_names_is(run, sites, tmp_path):
    (tmp_path / "lone_plugin.py").write_text(plugin_source())
    flags = ["-p", "no:apex", "-p", "lone_plugin"]

    acme, lone = external(run("plugins", "lock", "--json", *flags, path=[sites["both"], tmp_path]).document)

    assert acme["name"] == "acme"
    assert (lone["name"], lone["distribution"], lone["version"]) == ("lone_plugin", "(injected)", "")
    assert lone["digest"]


def test_a_plugin_that_kills_python_can_be_locked(run, tmp_path):
    done = run(
        "plugins", "lock", "--json", path=[PACKAGES / "kills_python", PACKAGES / "twin_one", PACKAGES / "twin_two"]
    )

    assert [each["name"] for each in external(done.document)] == ["kills_python"]
    assert any("twin-one:twin" in warning and "leaves it out" in warning for warning in done.document["warnings"])


def test_a_toggle_that_names_nothing_is_an_error_and_nothing_is_written(run, tmp_path):
    done = run("plugins", "lock", "-p", "acmee")
    assert (done.status, list(tmp_path.iterdir())) == (2, [])


# --- verify --------------------------------------------------------------------------------------------------------


def verify(run, lock, *arguments, **how):
    return run("plugins", "verify", "--no-import", "--json", "--lock", lock, *arguments, **how)


def test_the_locked_set_has_no_difference(run, sites, lock):
    assert verify(run, lock, path=[sites["both"]]).differences() == []
    assert verify(run, lock, path=[sites["in another order"]]).differences() == []


@pytest.mark.parametrize(
    ("site", "kind", "says"),
    [
        ("later", "version", "acme (acme-kvferry 1.1): version 1.1 here, 1.0 locked; pip install 'acme-kvferry==1.0'"),
        (
            "rebuilt",
            "files",
            "acme (acme-kvferry 1.0): other files than locked, of the same version: it is another build; "
            "pip install --force-reinstall --no-deps 'acme-kvferry==1.0', or lock again",
        ),
        (
            "renamed",
            "entry point",
            "acme (acme-kvferry 1.0): entry point acme_kvferry.other here, acme_kvferry locked;",
        ),
        ("apex alone", "missing", "acme (acme-kvferry 1.0): locked, and not installed here; pip install"),
        (
            "impostor",
            "distribution",
            "acme (impostor 1.0): brought by impostor 1.0 here, locked as acme-kvferry 1.0's;",
        ),
        ("editable", "files", "same version: an editable install is here, and an installed wheel is locked;"),
    ],
)
def test_every_kind_of_difference_is_named(run, sites, lock, site, kind, says):
    done = verify(run, lock, path=[sites[site]])

    assert done.status == 1
    assert [(each["plugin"], each["kind"]) for each in done.differences()] == [("acme", kind)]
    assert any(says in error["message"] for error in done.document["errors"])
    assert not done.document["ok"]


def test_a_plugin_that_was_added_is_named(run, sites, lock):
    done = verify(run, lock, path=[sites["both"], PACKAGES / "healthy"])
    (difference,) = done.differences()
    assert (difference["plugin"], difference["kind"], difference["locked"]) == ("healthy", "added", None)
    assert "-p no:healthy" in difference["fix"]


@pytest.mark.parametrize(
    ("flags", "environ", "by"),
    [
        (["-p", "no:acme"], {}, "by -p no:acme"),
        ([], {"KVFERRY_DISABLE_PLUGINS": "acme"}, "by KVFERRY_DISABLE_PLUGINS"),
        ([], {"KVFERRY_PLUGINS": "apex"}, "by KVFERRY_PLUGINS"),
    ],
)
def test_a_plugin_that_is_disabled_is_named_with_the_layer(run, sites, lock, flags, environ, by):
    (difference,) = verify(run, lock, *flags, path=[sites["both"]], **environ).differences()
    assert (difference["plugin"], difference["kind"], difference["found"]) == ("acme", "missing", "disabled")
    assert by in difference["what"]


def test_a_plugin_that_a_file_disables_is_named_with_the_file(run, sites, lock, tmp_path):
    (tmp_path / "kvferry.toml").write_text('[plugins]\ndisable = ["acme"]\n')
    (difference,) = verify(run, lock, path=[sites["both"]]).differences()
    assert str(tmp_path / "kvferry.toml") in difference["what"]


def test_a_name_that_another_claims_too_is_named(run, sites, lock):
    (difference,) = verify(run, lock, path=[sites["both"], sites["impostor"]]).differences()
    assert (difference["plugin"], difference["kind"], difference["found"]) == ("acme", "missing", "failed")
    assert "claimed by impostor too" in difference["what"]


def test_files_that_were_edited_or_removed_after_the_installation_are_named(run, sites, lock, tmp_path):
    shutil.copytree(sites["both"], tmp_path / "site")
    with (tmp_path / "site" / "acme_kvferry" / "__init__.py").open("a") as file:
        file.write("# edited\n")
    (tmp_path / "site" / "apex_kvferry.py").unlink()

    acme, apex = verify(run, lock, path=[tmp_path / "site"]).differences()

    assert (acme["kind"], apex["kind"]) == ("files", "files")
    assert "acme_kvferry/__init__.py changed since the installation" in acme["what"]
    assert "apex_kvferry.py, module apex_kvferry cannot be read" in apex["what"]


def test_sources_that_were_edited_are_told_of_an_editable_install(run, sites, tmp_path):
    project = write_project(tmp_path / "project", "acme-kvferry", "1.0", "acme", plugin_source())
    site = pip_install(tmp_path / "site", editable=project)
    assert run("plugins", "lock", path=[site, project]).status == 0
    assert verify(run, tmp_path / "kvferry.lock", path=[site, project]).differences() == []

    (project / "acme_kvferry" / "__init__.py").write_text(plugin_source("CPP"))

    (difference,) = verify(run, tmp_path / "kvferry.lock", path=[site, project]).differences()
    assert (difference["plugin"], difference["kind"]) == ("acme", "files")
    assert "its sources were edited" in difference["what"]


def test_verify_for_people_says_a_line_a_difference(run, sites, lock):
    done = run("plugins", "verify", "--no-import", "--lock", lock, path=[sites["later"]])
    assert done.status == 1
    assert "differs: acme (acme-kvferry 1.1): version 1.1 here, 1.0 locked; " in done.stdout
    assert f"{lock}: " in done.stdout


def test_without_a_lock_the_plugins_are_imported_all_the_same(run, sites):
    done = run("plugins", "verify", path=[sites["both"]])
    assert (done.status, done.stdout) == (0, "imported: 18 of 18 plugins\n")
    assert "nothing to compare with" in done.stderr


@pytest.mark.parametrize("content", ["version = 2\n", "version = 1\n", "no toml", ""])
def test_a_lock_that_is_none_is_exit_status_2(run, tmp_path, content):
    (tmp_path / "kvferry.lock").write_text(content)
    done = run("plugins", "verify", "--no-import")
    assert (done.status, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "write it again with `kvferry plugins lock`" in done.stderr


def test_a_lock_that_is_named_and_not_there_is_exit_status_2(run):
    done = run("plugins", "verify", "--json", "--lock", "absent.lock")
    assert (done.status, done.document["differences"]) == (2, [])


def test_plugins_that_crash_hang_exit_or_lie_are_found_by_name(run):
    broken = ["kills_python", "hangs_at_import", "import_exits", "import_raises", "misspelt_hook"]

    path = [PACKAGES / each for each in ["healthy", "prints_at_import", *broken]]
    done = run("plugins", "verify", "--json", "--timeout", "8", path=path)

    states = {each["name"]: each["state"] for each in done.document["imports"]}
    reasons = {each["name"]: each["reason"] for each in done.document["imports"]}
    assert done.status == 1
    assert {name: states[name] for name in broken} == dict.fromkeys(broken, "failed")
    assert {states[name] for name in states if name not in broken} == {"active"}
    assert "killed by signal 9" in reasons["kills_python"]
    assert "did not end within 8 s" in reasons["hangs_at_import"]
    assert len(done.document["errors"]) == len(broken)
    assert any("prints_at_import" in warning and "characters" in warning for warning in done.document["warnings"])


# --- a locked worker -----------------------------------------------------------------------------------------------

WORKER = ["worker", "--role", "context", "--model", "/nowhere"]


@pytest.mark.parametrize(
    ("site", "says"),
    [
        ("later", "acme (acme-kvferry 1.1): version 1.1 here, 1.0 locked"),
        ("rebuilt", "acme (acme-kvferry 1.0): other files than locked"),
        ("apex alone", "acme (acme-kvferry 1.0): locked, and not installed here"),
    ],
)
def test_a_worker_whose_plugins_differ_does_not_start(run, sites, lock, site, says):
    done = run(*WORKER, "--locked", lock, "--json", path=[sites[site]])

    assert (done.status, done.document["ready"]) == (2, False)
    (error,) = done.document["errors"]
    assert error["type"] == "PluginLoadError"
    assert says in error["message"]


def test_the_variable_locks_a_worker_to_the_usual_file(run, sites, lock, tmp_path):
    shutil.copy(lock, tmp_path)
    for value, flags in [("1", []), ("", ["--locked"]), ("0", ["--locked"])]:
        done = run(*WORKER, *flags, path=[sites["later"]], KVFERRY_LOCKED=value)
        assert done.status == 2
        assert "acme (acme-kvferry 1.1): version 1.1 here" in done.stderr
    assert "KVFERRY_LOCKED is 'yes'; write 1" in run(*WORKER, KVFERRY_LOCKED="yes").stderr


def test_no_plugin_of_another_set_is_imported(run, start):
    healthy = PACKAGES / "healthy"
    assert run("plugins", "lock", path=[healthy]).status == 0
    done = start(*WORKER, "--locked", path=[healthy, PACKAGES / "kills_python"])
    assert done.status == 2
    assert "kills_python (" in done.stderr
    assert "on here, and not locked" in done.stderr


def test_a_locked_plugin_that_fails_ends_the_start(run, start):
    """A plugin may be there file by file, and yet not load."""
    path = [PACKAGES / "import_raises"]
    assert run("plugins", "lock", path=path).status == 0
    done = start(*WORKER, "--locked", path=path)
    assert done.status == 2
    assert "import_raises" in done.stderr or "sources were edited" in done.stderr  # kvferry's own, meanwhile


def test_a_locked_worker_with_the_right_plugins_gets_beyond_them(run, start, sites):
    assert run("plugins", "lock", path=[sites["both"]]).status == 0
    done = start(*WORKER, "--locked", path=[sites["in another order"]])
    assert "/nowhere" in done.stderr or "sources were edited" in done.stderr  # kvferry's own, meanwhile
