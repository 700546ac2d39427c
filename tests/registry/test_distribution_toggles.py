import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.registry.answers import Rank
from kvferry.registry.discovery import Entry
from kvferry.registry.load import load_registry
from kvferry.registry.records import Origin, State
from kvferry.registry.selection import find_record, find_records, select
from kvferry.registry.toggles import Layer, Toggles, environment_layers, flag_layers
from kvferry_plugins.errors import ConfigError

ENTRIES = (
    Entry("acme", "acme", "Acme_KVferry", "1.0", "acme_kvferry", Origin.EXTERNAL),
    Entry("acme_fast", "acme_fast", "Acme_KVferry", "1.0", "acme_kvferry.fast", Origin.EXTERNAL),
    Entry("llama", "llama", "kvferry", "0.1.0", "llama_module", Origin.BUILTIN),
    Entry("one:twin", "twin", "one", "1", "one", Origin.EXTERNAL, contested="both"),
    Entry("zenith", "zenith", "zenith", "2.0", "zenith_kvferry", Origin.EXTERNAL),
    Entry("zenith_more", "zenith_more", "zenith", "2.0", "zenith_more", Origin.EXTERNAL),
)
ACME = {"acme", "acme_fast"}


def chosen(*layers, importable=()):
    return select(ENTRIES, Toggles(layers), is_importable=lambda module: module in importable)


def those(selection, state=State.DISABLED):
    return {record.name for record in selection.records if record.state is state}


@pytest.mark.parametrize("spelling", ["acme-kvferry", "Acme_KVferry", "ACME.kvferry", "acme-kvferry:*"])
@pytest.mark.parametrize(
    "layers",
    [
        lambda name: [Layer("kvferry.toml", disable=(name,))],
        lambda name: environment_layers({"KVFERRY_DISABLE_PLUGINS": f" {name} ,"}),
        lambda name: flag_layers([f"no:{name}"]),
    ],
    ids=["file", "variable", "flag"],
)
def test_a_distribution_that_is_named_takes_all_its_plugins_along(layers, spelling):
    selection = chosen(*layers(spelling))

    assert those(selection) == ACME
    assert selection.errors == selection.warnings == ()


def test_the_reason_says_that_the_distribution_was_named_and_the_record_which_layer():
    (record,) = [
        each for each in chosen(Layer("f", disable=("acme-kvferry",), kind="user")).records if each.name == "acme"
    ]

    assert (record.decided_by, record.layer) == ("f", "user")
    assert record.reason == "by f, which names its distribution Acme_KVferry"


def test_an_allow_list_of_a_distribution_keeps_all_its_plugins():
    assert those(chosen(*environment_layers({"KVFERRY_PLUGINS": "acme-kvferry"})), State.DISCOVERED) == {*ACME, "llama"}


def test_a_flag_that_names_a_distribution_beats_the_module_of_that_name():
    ranks = {
        each.name: each.rank for each in chosen(*flag_layers(["acme_kvferry"]), importable=["acme_kvferry"]).records
    }

    assert {name for name, rank in ranks.items() if rank is Rank.INJECTED} == ACME


@pytest.mark.parametrize("layer", [Layer("f", enable=("acme",), disable=("acme-kvferry",))])
def test_within_a_layer_a_plugins_own_name_beats_its_distributions(layer):
    assert those(chosen(layer)) == {"acme_fast"}


def test_a_plugins_name_is_meant_before_a_distributions():
    assert those(chosen(Layer("f", disable=("zenith",)))) == {"zenith"}
    assert those(chosen(Layer("f", disable=("zenith:*",)))) == {"zenith", "zenith_more"}


def test_enabling_the_distribution_of_a_contested_plugin_settles_it():
    assert "one:twin" in those(chosen(), State.FAILED)
    assert "one:twin" in those(chosen(Layer("f", enable=("one",))), State.DISCOVERED)


def test_a_required_distribution_requires_all_of_it():
    assert {each.name for each in chosen(Layer("f", required=("acme-kvferry",))).required} == ACME


def test_a_preferred_distribution_must_have_one_plugin():
    (error,) = chosen(Layer("f", prefer={"A": "acme-kvferry"})).errors

    assert str(error) == "f: prefer.A names 'acme-kvferry', which has several plugins; write 'acme' or 'acme_fast'"
    assert dict(chosen(Layer("f", prefer={"A": "one"})).prefer) == {"A": "one:twin"}


@pytest.mark.parametrize(
    "layer", [Layer("f", disable=("kvferry",)), *flag_layers(["kvferry"]), *flag_layers(["no:kvferry"])]
)
def test_our_own_distribution_is_no_toggle(layer):
    selection = chosen(layer, importable=["kvferry"])

    assert str(selection.errors[0]).endswith(": 'kvferry' is kvferry's own distribution: name its plugins one by one")
    assert those(selection) == set()


@pytest.mark.parametrize("layer", [Layer("f", enable=("acme-kvfery",)), *flag_layers(["no:acme-kvfery"])])
def test_a_misspelt_distribution_is_an_error_with_the_nearest_right_one(layer):
    (error,) = chosen(layer).errors

    assert "did you mean 'Acme_KVferry'?" in str(error)


@given(st.permutations(ENTRIES), st.lists(st.sampled_from(["acme-kvferry", "acme", "zenith:*", "one"]), max_size=4))
def test_the_order_of_installation_changes_nothing(entries, names):
    layers = [Layer(f"layer {number}", disable=(name,)) for number, name in enumerate(names)]

    selection = select(entries, Toggles(tuple(layers)), is_importable=lambda module: False)

    assert selection.records == chosen(*layers).records


def test_records_are_found_by_their_distribution():
    records = chosen().records

    assert {each.name for each in find_records(records, "acme.kvferry")} == ACME
    assert find_record(records, "one").name == "one:twin"
    with pytest.raises(
        ConfigError, match="'acme-kvferry' is a distribution with 2 plugins; write 'acme' or 'acme_fast'"
    ):
        find_record(records, "acme-kvferry")


def test_no_plugin_of_a_disabled_distribution_is_imported(install):
    install("several", "healthy")

    registry = load_registry(toggles=Toggles((Layer("f", disable=("several:*",)),)))

    assert [registry.record(name).state for name in ("several", "several_more")] == [State.DISABLED] * 2
    assert registry.record("healthy").is_active
