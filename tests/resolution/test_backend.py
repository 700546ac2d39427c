import pytest

from kvferry.config import parse_engine_args
from kvferry.dispatcher import resolve
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Toggles, flag_layers
from kvferry.resolution.selectors import SELECTORS, selector_warnings
from kvferry_plugins.errors import ConfigError, HookError, PluginConflictError
from kvferry_plugins.types import RuntimeSupport

BACKEND = "cache_transceiver_config.backend"


def section(backend):
    return {"cache_transceiver_config": {"backend": backend}}


class Unread(dict):
    def _refuse(self, *_):
        raise AssertionError("the environment was read")

    __getitem__ = __iter__ = __contains__ = get = items = keys = _refuse


@pytest.mark.parametrize("config", [{}, {"cache_transceiver_config": None}, section(None)])
def test_the_environment_is_not_read_while_the_transceiver_is_off(planned, config):
    assert planned(config, environ=Unread()).backend is None


def test_who_switched_it_off_is_told(planned):
    assert planned({}).decision(BACKEND).source == "default"
    assert planned({"cache_transceiver_config": {}}).decision(BACKEND).source == "default"
    assert planned({"cache_transceiver_config": None}).decision(BACKEND).source == "user"
    assert planned(section(None)).decision(BACKEND).source == "user"


def test_the_file_that_decides_is_named(planned):
    args = parse_engine_args(section("UCX"), origin="engine.yaml")
    assert planned(args).decision(BACKEND).by == "engine.yaml"


def test_default_means_the_named_default_where_no_variable_is_set(planned):
    decision = planned(section("DEFAULT")).decision(BACKEND)
    assert (decision.requested, decision.value, decision.source, decision.by) == ("DEFAULT", "NIXL", "default", None)


@pytest.mark.parametrize(("variable", "backend"), SELECTORS)
def test_each_variable_selects_its_backend_and_is_named(planned, variable, backend):
    plan = planned(section("DEFAULT"), environ={variable: "1"})
    decision = plan.decision(BACKEND)
    assert (decision.value, decision.source, decision.by) == (backend, "environment", variable)
    assert plan.effective["cache_transceiver_config"]["backend"] == backend
    assert any(variable in warning and f"{BACKEND}: {backend}" in warning for warning in plan.warnings)


def test_variables_that_come_later_are_losing_candidates(planned):
    decision = planned(section("DEFAULT"), environ={variable: "1" for variable, _ in SELECTORS}).decision(BACKEND)
    assert decision.value == "NIXL"
    assert [(one.value, one.by) for one in decision.candidates] == [(name, var) for var, name in SELECTORS[1:]]


def test_a_variable_that_an_explicit_backend_overrides_is_a_losing_candidate(planned):
    plan = planned(section("UCX"), environ={"TRTLLM_USE_NIXL_KVCACHE": "1"})
    (candidate,) = plan.decision(BACKEND).candidates
    assert (candidate.value, candidate.source, candidate.by) == ("NIXL", "environment", "TRTLLM_USE_NIXL_KVCACHE")
    assert plan.warnings == ()


@pytest.mark.parametrize("value", ["true", "yes", "on", "2", " 1"])
def test_a_value_that_was_meant_to_select_is_a_warning(value):
    (warning,) = selector_warnings({"TRTLLM_USE_UCX_KVCACHE": value})
    assert "TRTLLM_USE_UCX_KVCACHE" in warning


@pytest.mark.parametrize("value", ["0", "", "false", "off", "1"])
def test_a_value_that_says_no_or_selects_is_none(value):
    assert selector_warnings({"TRTLLM_USE_UCX_KVCACHE": value}) == ()


@pytest.mark.parametrize(
    "name",
    [
        "TRTLLM_USE_UCX_KV_CACHE",
        "TRTLLM_USE_NIXL_KVCACHES",
        "TRTLM_USE_NIXL_KVCACHE",
        "TRTLLM_USE_FOO_KVCACHE",
        "trtllm_use_ucx_kvcache",
    ],
)
def test_a_name_that_looks_like_a_selector_is_a_warning(name):
    (warning,) = selector_warnings({name: "1", "PATH": "/bin"})
    assert name in warning
    assert "TRTLLM_USE_" in warning.removeprefix(name)


@pytest.mark.parametrize("name", ["PATH", "TRTLLM_NIXL_KVCACHE_BACKEND", "USE_KV", "TRTLLM_DISAGG_ENABLE_CANCEL"])
def test_other_names_are_none(name):
    assert selector_warnings({name: "1"}) == ()


def test_an_unknown_backend_names_the_nearest_and_every_plugin_that_is_not_active():
    registry = load_registry(toggles=Toggles(flag_layers(["no:ucx", "no:mpi"])))
    with pytest.raises(ConfigError) as raised:
        resolve(section("UCXX"), model=None, registry=registry, environ={})
    message = str(raised.value)
    assert raised.value.setting == BACKEND
    assert "declared: MOONCAKE, NIXL" in message
    assert "ucx (kvferry" in message
    assert "-p no:mpi" in message


def test_an_unknown_backend_that_a_variable_selected_names_the_variable():
    registry = load_registry(toggles=Toggles(flag_layers(["no:ucx"])))
    with pytest.raises(ConfigError, match="TRTLLM_USE_UCX_KVCACHE=1"):
        resolve(section("DEFAULT"), model=None, registry=registry, environ={"TRTLLM_USE_UCX_KVCACHE": "1"})


def test_a_third_partys_backend_is_chosen_by_its_name(planned, declare, backend):
    plugin = declare("acme", backends=[backend("WARP", {"CPP": RuntimeSupport()})])
    plan = planned(section("WARP"), plugin)
    assert (plan.backend, plan.runtime, plan.providers.backend) == ("WARP", "CPP", "acme")


def test_an_injected_backend_outranks_the_built_in_one_of_its_name(planned, declare, backend):
    plugin = declare("acme", backends=[backend("UCX", {"CPP": RuntimeSupport()})])
    assert planned(section("UCX"), plugin).providers.backend == "acme"


def test_two_providers_of_one_rank_conflict_until_one_is_preferred(planned, declare, backend):
    both = [declare(name, backends=[backend("WARP", {"CPP": RuntimeSupport()})]) for name in ("zenith", "acme")]
    with pytest.raises(PluginConflictError, match=r"prefer: \{WARP: acme\}") as raised:
        planned(section("WARP"), *both)
    assert raised.value.plugins == ("acme", "zenith")
    config = {**section("WARP"), "plugins": {"prefer": {"WARP": "zenith"}}}
    assert planned(config, *both).providers.backend == "zenith"


def test_the_preferred_plugin_beats_rank(planned, declare, backend):
    plugin = declare("acme", backends=[backend("UCX", {"CPP": RuntimeSupport()})])
    config = {**section("UCX"), "plugins": {"prefer": {"UCX": "ucx"}}}
    assert planned(config, plugin).providers.backend == "ucx"


@pytest.mark.parametrize("runtimes", [{}, {"JAVA": RuntimeSupport()}])
def test_a_declaration_outside_the_vocabulary_names_its_plugin(planned, declare, backend, runtimes):
    with pytest.raises(HookError, match="acme") as raised:
        planned(section("WARP"), declare("acme", backends=[backend("WARP", runtimes)]))
    assert (raised.value.hook, raised.value.plugin) == ("transfer_backends", "acme")


def test_a_deprecated_backend_is_a_warning(planned):
    assert any("MPI is deprecated" in warning for warning in planned(section("MPI")).warnings)
