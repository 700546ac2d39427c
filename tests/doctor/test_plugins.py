import pytest

from kvferry.doctor.findings import Severity
from kvferry.doctor.plugins import plugin_findings, unavailable_findings
from kvferry.registry.discovery import discover
from kvferry.registry.inspection import inspect_plugins
from kvferry.registry.records import State
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Layer, Toggles, flag_layers

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


@pytest.fixture
def findings(install):
    def look(*folders, layers=(), timeout=20.0):
        install(*folders)
        discovery = discover()
        selection = survey(discovery, Toggles(tuple(layers)))
        records = [record for record in selection.records if record.state is State.DISCOVERED]
        inspected = inspect_plugins(records, timeout=timeout)
        return [*plugin_findings(selection, inspected, discovery.warnings), *unavailable_findings(inspected)]

    return look


def about(findings, plugin):
    return [each for each in findings if each.plugin == plugin]


def test_our_own_are_all_fine(findings):
    assert [each for each in findings() if each.severity in (ERROR, WARNING)] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("import_raises", "kvferry_no_such_module"),
        ("import_exits", "sys.exit(3)"),
        ("misspelt_hook", "did you mean 'preferred_transceiver_runtime'?"),
        ("kills_python", "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_plugin_that_does_not_load_is_an_error_with_its_distribution(findings, name, words):
    (finding,) = about(findings(name, "healthy"), name)

    assert finding.severity is ERROR
    assert words in finding.what
    assert finding.distribution == f"{name.replace('_', '-')} 0.1"
    assert f"kvferry plugins disable {name}" in finding.fix


def test_an_import_that_hangs_is_an_error_and_stops_nothing(findings):
    found = findings("hangs_at_import", "healthy", timeout=2.0)

    (finding,) = about(found, "hangs_at_import")
    assert "did not end within 2 s" in finding.what
    assert [each.plugin for each in found if each.severity is ERROR] == ["hangs_at_import"]


def test_a_disabled_plugin_is_told_and_not_imported(findings):
    (finding,) = about(findings("kills_python", layers=flag_layers(["no:kills_python"])), "kills_python")

    assert (finding.severity, finding.what) == (INFO, "is disabled by -p no:kills_python")


def test_a_heavy_import_is_a_warning(findings):
    (finding,) = about(findings("imports_torch", timeout=60.0), "imports_torch")

    assert finding.severity is WARNING
    assert "imports torch when it is imported" in finding.what


def test_an_import_that_does_more_than_importing_is_a_warning(findings):
    (finding,) = about(findings("forks_at_import"), "forks_at_import")

    assert (finding.severity, finding.distribution) == (WARNING, "forks-at-import 0.1")
    assert finding.what == "its import forks 1 time(s) (the child was ended)"


def test_twins_and_a_taken_name_are_errors_that_say_how_to_have_them(findings):
    found = findings("twin_one", "twin_two", "takes_a_builtin_name")

    for name in ("twin-one:twin", "twin-two:twin", "name-taker:llama"):
        (finding,) = about(found, name)
        assert finding.severity is ERROR
        assert f"enable {name!r}" in str(finding)


def test_a_distribution_twice_on_the_path_is_a_warning(findings):
    (finding,) = [each for each in findings("copy_first", "copy_second") if "more than once" in each.what]

    assert finding.severity is WARNING


def test_a_toggle_that_names_nobody_is_an_error(findings):
    (finding,) = [each for each in findings(layers=[Layer("kvferry.toml", enable=("lama",))]) if each.severity is ERROR]

    assert "kvferry.toml: enable names the plugin 'lama'" in finding.what
    assert finding.fix == "did you mean 'llama'?"


@pytest.mark.parametrize("demand", [{"required": ("import_raises",)}, {"prefer": {"UCX": "import_raises"}}])
def test_a_plugin_that_is_demanded_and_failed_keeps_workers_from_starting(findings, demand):
    found = about(findings("import_raises", layers=[Layer("kvferry.toml", **demand)]), "import_raises")

    assert any("by kvferry.toml, and is not active: no worker starts" in each.what for each in found)


def test_of_two_that_bring_one_backend_the_winner_shadows_the_other(findings, tmp_path, monkeypatch):
    add_backend(tmp_path, monkeypatch, "fast_ucx", "UCX")

    found = findings(layers=flag_layers(["module:fast_ucx"]))

    (finding,) = about(found, "ucx")
    assert (finding.severity, finding.what) == (
        INFO,
        "brings the backend UCX, and is shadowed by fast_ucx, which wins as the injected one",
    )
    assert about(found, "fast_ucx") == []


def test_of_two_of_one_rank_neither_wins_without_a_preference(findings, tmp_path, monkeypatch):
    for name in ("one_ucx", "other_ucx"):
        add_backend(tmp_path, monkeypatch, name, "FASTER")
    flags = flag_layers(["module:one_ucx", "module:other_ucx"])

    (finding,) = about(findings(layers=flags), "one_ucx")
    assert finding.severity is ERROR
    assert "plugins.prefer: {FASTER: one_ucx}" in finding.fix

    preferring = Layer("engine.yaml", prefer={"FASTER": "other_ucx"})
    (finding,) = about(findings(layers=[preferring, *flags]), "one_ucx")
    assert "shadowed by other_ucx, which wins by plugins.prefer" in finding.what


def test_a_declaration_that_raises_is_found_before_a_verb_meets_it(findings, tmp_path, monkeypatch):
    (tmp_path / "raises_late.py").write_text(
        "from kvferry_plugins import hookimpl\n\n@hookimpl\ndef transfer_backends():\n    raise OSError('no card')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    (finding,) = about(findings(layers=flag_layers(["module:raises_late"])), "raises_late")

    assert finding.severity is ERROR
    assert "transfer_backends raised OSError: no card" in finding.what


def add_backend(folder, monkeypatch, module, backend):
    (folder / f"{module}.py").write_text(
        "from kvferry_plugins import hookimpl\n"
        "from kvferry_plugins.types import RuntimeSupport, TransferBackend\n\n"
        "@hookimpl\ndef transfer_backends():\n"
        f"    return [TransferBackend({backend!r}, {{'CPP': RuntimeSupport()}}, probe='json:dumps')]\n"
    )
    monkeypatch.syspath_prepend(str(folder))
