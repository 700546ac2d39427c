import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.registry.answers import Rank
from kvferry.registry.discovery import Entry
from kvferry.registry.load import load_registry
from kvferry.registry.records import Origin, State
from kvferry.registry.selection import select
from kvferry.registry.toggle_files import project_file, read_toggles, user_file
from kvferry.registry.toggles import Layer, Toggles, environment_layers, flag_layers
from kvferry_plugins.errors import ConfigError, PluginLoadError, ResolutionError
from kvferry_plugins.testing import FakeModelPlugin

ENTRIES = (
    Entry("acme", "acme", "acme-kvferry", "1.0", "acme_kvferry", Origin.EXTERNAL),
    Entry("llama", "llama", "kvferry", "0.1.0", "llama_module", Origin.BUILTIN),
    Entry("zenith", "zenith", "zenith-kvferry", "2.0", "zenith_kvferry", Origin.EXTERNAL),
)


def chosen(*layers, importable=()):
    return select(ENTRIES, Toggles(layers), is_importable=lambda module: module in importable)


def states(selection):
    return {record.name: (record.state, record.decided_by) for record in selection.records}


ON = (State.DISCOVERED, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "acme llama zenith"),
        ({"KVFERRY_PLUGINS": ""}, "llama"),
        ({"KVFERRY_PLUGINS": " acme , "}, "acme llama"),
        ({"KVFERRY_PLUGINS": "acme,zenith", "KVFERRY_DISABLE_PLUGINS": "zenith"}, "acme llama"),
        ({"KVFERRY_DISABLE_PLUGINS": " acme ,llama"}, "zenith"),
        ({"KVFERRY_DISABLE_PLUGIN_AUTOLOAD": "1"}, "llama"),
        ({"KVFERRY_DISABLE_PLUGIN_AUTOLOAD": "1", "KVFERRY_PLUGINS": "zenith"}, "llama zenith"),
        ({"KVFERRY_DISABLE_PLUGIN_AUTOLOAD": "0"}, "acme llama zenith"),
    ],
    ids=str,
)
def test_the_environment_decides(environ, expected):
    selection = chosen(*environment_layers(environ))

    assert {name for name, (state, _) in states(selection).items() if state is State.DISCOVERED} == set(
        expected.split()
    )
    assert selection.errors == ()


def test_a_record_says_which_variable_or_flag_decided():
    by_variable = chosen(*environment_layers({"KVFERRY_PLUGINS": "zenith"}))
    by_flag = chosen(*flag_layers(["no:llama"]))

    assert states(by_variable)["acme"] == (State.DISABLED, "KVFERRY_PLUGINS")
    assert states(by_flag)["llama"] == (State.DISABLED, "-p no:llama")


@given(st.lists(st.tuples(st.sampled_from("ed"), st.sampled_from(["acme", "llama"])), max_size=6))
def test_the_highest_layer_that_speaks_of_a_plugin_decides(moves):
    layers = [
        Layer(f"layer {number}", enable=(name,) if move == "e" else (), disable=(name,) if move == "d" else ())
        for number, (move, name) in enumerate(moves)
    ]

    result = states(chosen(*layers))

    for name in ("acme", "llama"):
        spoken = [(number, move) for number, (move, each) in enumerate(moves) if each == name]
        number, move = spoken[-1] if spoken else (None, "e")
        expected = State.DISABLED if move == "d" else State.DISCOVERED
        assert result[name] == (expected, f"layer {number}" if spoken else None)


@pytest.mark.parametrize(
    "layer",
    [
        Layer("kvferry.toml", enable=("acmee",)),
        Layer("kvferry.toml", required=("acmee",)),
        Layer("kvferry.toml", prefer={"LlamaForCausalLM": "acmee"}),
        *flag_layers(["acmee"]),
        *flag_layers(["no:acmee"]),
        *environment_layers({"KVFERRY_PLUGINS": "acmee"}),
    ],
    ids=str,
)
def test_an_unknown_name_is_an_error_with_the_nearest_right_one(layer):
    (error,) = chosen(layer).errors

    assert "did you mean 'acme'?" in str(error)
    assert layer.source in str(error)


@pytest.mark.parametrize(
    "layer", [Layer("kvferry.toml", disable=("acmee",)), *environment_layers({"KVFERRY_DISABLE_PLUGINS": "acmee"})]
)
def test_an_unknown_name_in_a_stored_disable_is_a_warning(layer):
    selection = chosen(layer)

    assert selection.errors == ()
    assert "did you mean 'acme'?" in selection.warnings[0]


def test_an_installed_plugin_named_by_a_flag_ranks_as_injected():
    ranks = {record.name: record.rank for record in chosen(*flag_layers(["acme"])).records}

    assert ranks == {"acme": Rank.INJECTED, "llama": Rank.BUILTIN, "zenith": Rank.EXTERNAL}


def test_a_flag_brings_back_what_a_lower_layer_disabled_and_the_last_flag_wins():
    off = Layer("kvferry.toml", disable=("acme",))

    assert states(chosen(off, *flag_layers(["acme"])))["acme"] == (State.DISCOVERED, "-p acme")
    assert states(chosen(off, *flag_layers(["acme", "no:acme"])))["acme"][0] is State.DISABLED
    assert states(chosen(off, *flag_layers(["no:acme", "acme"])))["acme"][0] is State.DISCOVERED


def test_a_name_that_is_no_plugin_is_taken_as_a_module():
    selection = chosen(*flag_layers(["my.module"]), importable=["my.module"])

    (record,) = [record for record in selection.records if record.origin is Origin.INJECTED]
    assert (record.name, record.rank, record.distribution) == ("my.module", Rank.INJECTED, "(injected)")


def test_module_forces_a_module_even_where_a_plugin_has_the_name():
    names = {
        record.name: record.entry_point for record in chosen(*flag_layers(["module:acme"]), importable=["acme"]).records
    }

    assert names["acme"] == "acme_kvferry"
    assert names["module:acme"] == "acme"


def test_a_module_that_is_not_there_is_said_to_be_that():
    (error,) = chosen(*flag_layers(["module:gone"])).errors

    assert str(error) == (
        "-p module:gone: there is no such module; is its folder in PYTHONPATH, or its package installed?"
    )


@pytest.mark.parametrize("flag", ["", "  ", "no:", "module:"])
def test_a_flag_that_names_nothing_is_an_error(flag):
    with pytest.raises(ConfigError, match="names no plugin"):
        flag_layers([flag])


def test_a_disabled_plugin_is_never_imported(install):
    install("import_raises")

    registry = load_registry(toggles=Toggles(flag_layers(["no:import_raises"])))

    assert registry.record("import_raises").state is State.DISABLED
    assert registry.warnings == ()


def test_a_module_named_by_a_flag_is_loaded(tmp_path, monkeypatch):
    FakeModelPlugin("AcmeForCausalLM", runtime="CPP", name="flagged").write_module(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    registry = load_registry(toggles=Toggles(flag_layers(["module:flagged"])))

    (answer,) = registry.preferred_transceiver_runtime("AcmeForCausalLM", None)
    assert (answer.plugin, answer.rank, answer.distribution) == ("flagged", Rank.INJECTED, "(injected)")


@pytest.mark.parametrize(
    "toggles", [{"required": ("import_raises",)}, {"prefer": {"AcmeForCausalLM": "import_raises"}}]
)
def test_a_demanded_plugin_that_failed_is_fatal_and_its_state_is_quoted(install, toggles):
    install("import_raises")

    with pytest.raises(PluginLoadError, match=r"kvferry\.toml.*is failed: .*kvferry_no_such_module"):
        load_registry(toggles=Toggles((Layer("kvferry.toml", **toggles),)))


def test_a_required_plugin_that_is_disabled_is_fatal(install):
    install("healthy")
    layers = (Layer("kvferry.toml", required=("healthy",)), *flag_layers(["no:healthy"]))

    with pytest.raises(PluginLoadError, match="is disabled: by -p no:healthy"):
        load_registry(toggles=Toggles(layers))


def test_several_errors_come_at_once():
    layers = (Layer("kvferry.toml", enable=("nobody",), required=("noone",)),)

    with pytest.raises(ResolutionError, match=r"(?s)nobody.*noone"):
        load_registry(toggles=Toggles(layers))


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def environ(tmp_path):
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_layers_stand_in_order_user_project_yaml_environment_flag(environ, tmp_path):
    user = write(user_file(environ), '[plugins]\nenable = ["acme"]\n')
    project = write(tmp_path / "project" / "kvferry.toml", '[plugins]\ndisable = [" acme "]\n')
    folder = tmp_path / "project" / "deep" / "er"
    folder.mkdir(parents=True)

    toggles = read_toggles(
        environ={**environ, "KVFERRY_PLUGINS": "acme"},
        folder=folder,
        flags=["no:acme"],
        config={"enable": ["acme"]},
        config_name="engine.yaml",
    )

    sources = [layer.source for layer in toggles.layers]
    assert sources == [str(user), str(project), "engine.yaml (plugins)", "KVFERRY_PLUGINS", "-p no:acme"]
    assert toggles.layers[1].disable == ("acme",)


def test_the_nearest_project_file_counts_alone(environ, tmp_path):
    write(tmp_path / "kvferry.toml", "")
    near = write(tmp_path / "a" / "kvferry.toml", "")

    assert project_file(tmp_path / "a", environ) == near


def test_the_users_own_file_is_no_projects(environ):
    path = write(user_file(environ), "")

    assert project_file(path.parent, environ) is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[plugins\n", "cannot be read as TOML"),
        ("[plugin]\n", "unknown key 'plugin'"),
        ("[plugins]\ndisabled = []\n", "did you mean 'disable'?"),
        ('[plugins]\ndisable = "acme"\n', "must be a list"),
        ("[plugins]\ndisable = [1]\n", "must be a list"),
        ("plugins = 3\n", "must be a section"),
        ('[plugins]\nprefer = ["acme"]\n', "must map"),
        ('[plugins]\nenable = ["acme"]\ndisable = ["acme"]\n', "both enabled and disabled"),
        (b"\xff", "cannot be read as TOML"),
    ],
    ids=str,
)
def test_a_file_that_is_wrong_is_an_error_naming_it(environ, tmp_path, text, word):
    path = tmp_path / "kvferry.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(ConfigError, match=r"kvferry\.toml") as caught:
        read_toggles(environ=environ, folder=tmp_path)

    assert word in str(caught.value)


def test_preferences_of_a_higher_layer_win_key_by_key(environ, tmp_path):
    write(user_file(environ), '[plugins.prefer]\nA = "acme"\nB = "acme"\n')
    toggles = read_toggles(environ=environ, folder=tmp_path, config={"prefer": {"B": "zenith"}})

    assert dict(chosen(*toggles.layers).prefer) == {"A": "acme", "B": "zenith"}
