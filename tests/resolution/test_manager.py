import pytest

from kvferry.checkpoint import load_model_spec
from kvferry.dispatcher import resolve
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Toggles, flag_layers
from kvferry.testing import isolated_registry
from kvferry_plugins.errors import ConfigError, PluginConflictError
from kvferry_plugins.testing import FakeModelPlugin
from kvferry_plugins.types import RuntimeSupport

MANAGER = "kv_cache_config.use_kv_cache_manager_v2"
WARP = {"cache_transceiver_config": {"backend": "WARP"}}


def wish(value, name=None):
    defaults = {"kv_cache_config": {"use_kv_cache_manager_v2": value}}
    return FakeModelPlugin("AcmeForCausalLM", defaults=defaults, name=name)


def asked(value):
    return {"kv_cache_config": {"use_kv_cache_manager_v2": value}}


def drives(*names):
    return {"CPP": RuntimeSupport(managers=frozenset(names))}


@pytest.mark.parametrize("config", [{}, asked("auto")])
def test_auto_takes_the_models_wish_and_logs_it(planned, config):
    plan = planned(config, wish(True, "acme"))
    decision = plan.decision(MANAGER)
    assert (decision.requested, decision.value, decision.source, decision.by) == ("auto", True, "model", "acme")
    assert plan.manager == "V2"
    assert plan.log == ("Resolved use_kv_cache_manager_v2='auto' to True for AcmeForCausalLM.",)


@pytest.mark.parametrize(("value", "source"), [(False, "model"), ("auto", "fallback")])
def test_a_model_that_says_no_or_nothing_gets_v1(planned, value, source):
    plan = planned({}, wish(value))
    assert (plan.manager, plan.decision(MANAGER).value, plan.decision(MANAGER).source) == ("V1", False, source)


def test_auto_of_one_plugin_does_not_contradict_another(planned):
    assert planned({}, wish("auto", "acme"), wish(True, "zenith")).manager == "V2"


def test_a_contradiction_is_a_conflict_unless_the_user_decides(planned):
    both = wish(False, "acme"), wish(True, "zenith")
    with pytest.raises(PluginConflictError, match="AcmeForCausalLM"):
        planned({}, *both)
    plan = planned(asked(True), *both)
    assert plan.manager == "V2"
    assert [one.by for one in plan.decision(MANAGER).candidates] == ["acme", "zenith"]


def test_the_effective_setting_is_never_auto(planned):
    assert planned({}).effective["kv_cache_config"]["use_kv_cache_manager_v2"] is False


@pytest.mark.parametrize("by", ["backend", "runtime"])
def test_an_auto_v2_that_the_transceiver_cannot_drive_becomes_v1(planned, declare, backend, runtime, by):
    support = drives("V1") if by == "backend" else {"CPP": RuntimeSupport()}
    runtimes = [runtime("CPP", managers=frozenset({"V1"}))] if by == "runtime" else []
    plugin = declare("warp", backends=[backend("WARP", support)], runtimes=runtimes)
    plan = planned(WARP, plugin, wish(True, "acme"))
    decision = plan.decision(MANAGER)
    assert (plan.manager, decision.value, decision.source) == ("V1", False, "fallback")
    assert "cannot drive manager V2" in decision.reason
    assert (decision.candidates[0].value, decision.candidates[0].by) == (True, "acme")


def test_an_explicit_v2_that_the_transceiver_cannot_drive_is_an_error(planned, declare, backend):
    plugin = declare("warp", backends=[backend("WARP", drives("V1"))])
    with pytest.raises(ConfigError, match="cannot drive manager V2") as raised:
        planned({**WARP, **asked(True)}, plugin)
    assert raised.value.setting == MANAGER


@pytest.mark.parametrize("config", [{}, asked(False)])
def test_a_transceiver_that_cannot_drive_v1_says_what_to_set(planned, declare, backend, config):
    plugin = declare("warp", backends=[backend("WARP", drives("V2"))])
    with pytest.raises(ConfigError, match=r"set kv_cache_config\.use_kv_cache_manager_v2 to true"):
        planned({**WARP, **config}, plugin)
    assert planned({**WARP, **asked(True)}, plugin).manager == "V2"


def test_a_transceiver_that_is_off_demotes_nothing(planned, declare, backend):
    plugin = declare("warp", backends=[backend("WARP", drives("V1"))])
    assert planned({}, plugin, wish(True)).manager == "V2"


def test_a_plugins_own_v2_outranks_ours(planned, declare, manager):
    plan = planned(asked(True), declare("acme", managers=[manager("V2")]))
    assert plan.providers.manager == "acme"


def test_a_manager_that_nobody_provides_is_an_error_that_says_who_might():
    registry = load_registry(toggles=Toggles(flag_layers(["no:cache_manager_v1"])))
    from kvferry.dispatcher import resolve

    with pytest.raises(ConfigError, match=r"cache_manager_v1 .* disabled") as raised:
        resolve({}, model=None, registry=registry, environ={})
    assert raised.value.setting == MANAGER


def test_a_registry_with_nothing_built_in_has_no_manager(planned):
    with pytest.raises(ConfigError, match="V1"):
        planned({}, registry=isolated_registry(builtin=False))


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "lfm2"])
def test_a_manager_without_a_place_for_a_layer_is_refused_before_anything_is_built(tiny_checkpoint, name):
    model = load_model_spec(tiny_checkpoint(name))

    with pytest.raises(ConfigError, match="it holds keys and values of equal layers only"):
        resolve(asked(False), model=model, registry=isolated_registry(), environ={})

    assert resolve(asked(True), model=model, registry=isolated_registry(), environ={})


def test_windows_beside_full_layers_fit_into_one_pool(tiny_checkpoint):
    model = load_model_spec(tiny_checkpoint("gemma3"))

    assert resolve({}, model=model, registry=isolated_registry(), environ={}).manager == "V1"
