import subprocess
import sys

import pytest

from kvferry.registry.load import load_registry
from kvferry.registry.records import State
from kvferry.registry.toggles import Layer, Toggles, flag_layers
from kvferry_plugins.errors import ConfigError, PluginLoadError

BROKEN = {
    "import_raises": ("import", "kvferry_no_such_module"),
    "import_exits": ("import", "sys.exit(3)"),
    "missing_library": ("import", "libkvferry_no_such_library.so.1"),
    "misspelt_hook": ("registration", "did you mean 'preferred_transceiver_runtime'?"),
    "extra_argument": ("registration", "did you mean 'pretrained_config'?"),
    "no_plugin": ("registration", "mark functions with @hookimpl"),
    "names_a_class": ("registration", "is the class 'Plugin'"),
    "missing_attribute": ("import", "has no attribute 'plugin'"),
}


def runtimes(registry):
    answers = registry.preferred_transceiver_runtime("AcmeForCausalLM", None)
    return {answer.plugin: answer.value for answer in answers}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_named_leaves_nothing_behind_and_stops_nothing(install, name):
    install(name, "healthy")
    stage, word = BROKEN[name]

    registry = load_registry(toggles=Toggles())

    record = registry.record(name)
    assert (record.state, record.stage) == (State.FAILED, stage)
    assert word in record.reason
    assert record.causes
    assert record.hooks == ()
    assert any(name in warning and word in warning for warning in registry.warnings)
    assert runtimes(registry) == {"healthy": "PYTHON"}
    assert all(answer.plugin != name for answer in registry.model_defaults("AcmeForCausalLM", None, None))


def test_all_broken_plugins_together_stop_nothing(install):
    install(*BROKEN, "healthy")

    registry = load_registry(toggles=Toggles())

    assert {name for name in BROKEN if registry.record(name).state is State.FAILED} == set(BROKEN)
    assert runtimes(registry) == {"healthy": "PYTHON"}


def test_the_whole_cause_chain_is_kept(install, tmp_path, monkeypatch):
    package = tmp_path / "chained"
    (package / "chained-1.dist-info").mkdir(parents=True)
    (package / "chained-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: chained\nVersion: 1\n")
    (package / "chained-1.dist-info" / "entry_points.txt").write_text("[kvferry]\nchained = chained_plugin\n")
    (package / "chained_plugin.py").write_text(
        "try:\n    import kvferry_gone\nexcept ImportError as error:\n    raise RuntimeError('it is gone') from error\n"
    )
    monkeypatch.syspath_prepend(str(package))

    record = load_registry(toggles=Toggles()).record("chained")

    assert record.causes == ("RuntimeError: it is gone", "ModuleNotFoundError: No module named 'kvferry_gone'")


def test_two_strangers_with_one_name_both_fail_and_say_how_to_have_either(install):
    install("twin_one", "twin_two")

    registry = load_registry(toggles=Toggles())

    assert [registry.record(f"twin-{number}:twin").state for number in ("one", "two")] == [State.FAILED] * 2
    assert "enable 'twin-one:twin'" in registry.record("twin-one:twin").reason
    assert runtimes(registry) == {}


@pytest.mark.parametrize("spelling", ["twin-two:twin", "Twin_Two:twin"])
def test_a_contested_name_is_had_by_its_distribution(install, spelling):
    install("twin_one", "twin_two")

    registry = load_registry(toggles=Toggles((Layer("kvferry.toml", enable=(spelling,)),)))

    assert runtimes(registry) == {"twin-two:twin": "CPP"}
    assert registry.record("twin-one:twin").state is State.FAILED


def test_enabling_a_contested_plain_name_is_an_error_that_lists_both(install):
    install("twin_one", "twin_two")

    with pytest.raises(ConfigError, match=r"'twin-one:twin' or 'twin-two:twin'"):
        load_registry(toggles=Toggles((Layer("kvferry.toml", enable=("twin",)),)))


def test_a_builtin_keeps_its_name_and_the_stranger_fails(install):
    install("takes_a_builtin_name")

    registry = load_registry(toggles=Toggles())

    assert registry.record("llama").distribution == "kvferry"
    stranger = registry.record("name-taker:llama")
    assert stranger.state is State.FAILED
    assert "is a built-in's" in stranger.reason


def test_of_one_distribution_twice_on_the_path_the_first_counts_and_a_warning_shows_both(install):
    install("copy_first", "copy_second")

    registry = load_registry(toggles=Toggles())

    assert registry.record("copied").version == "1.0"
    assert runtimes(registry) == {"copied": "PYTHON"}
    (warning,) = [warning for warning in registry.warnings if "more than once" in warning]
    assert "copy_first" in warning
    assert "copy_second" in warning


def test_strict_makes_any_failure_fatal(install):
    install("import_raises")

    with pytest.raises(PluginLoadError, match=r"import_raises.*--strict-plugins"):
        load_registry(toggles=Toggles(strict=True))


def test_a_backend_without_its_library_is_unavailable_but_declared(install):
    install("absent_backend")

    registry = load_registry(toggles=Toggles())

    record = registry.record("absent_backend")
    assert record.state is State.UNAVAILABLE
    assert record.reason == "kvferry_no_such_module is not installed; pip install kvferry-no-such-module"
    assert "ABSENT" in [answer.value.name for answer in registry.transfer_backends()]


def test_a_stranger_that_imports_torch_is_named_in_a_warning(install):
    install("imports_torch")
    code = (
        "from kvferry.registry.load import load_registry; from kvferry.registry.toggles import Toggles\n"
        "print(*load_registry(toggles=Toggles()).warnings, sep='\\n')"
    )

    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert "plugin 'imports_torch' (imports-torch 0.1) imports torch when it is imported" in told


def test_what_a_plugin_prints_at_import_stays_out_of_standard_output(tmp_path, monkeypatch, capsys):
    (tmp_path / "chatty_plugin.py").write_text("print('hello from acme')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    load_registry(toggles=Toggles(flag_layers(["module:chatty_plugin"])))

    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "hello from acme\n")
