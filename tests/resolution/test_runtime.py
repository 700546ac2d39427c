import pytest

from kvferry.checkpoint import ModelSpec
from kvferry.dispatcher import resolve
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Toggles, flag_layers
from kvferry_plugins import hookimpl
from kvferry_plugins.errors import ConfigError, HookError, PluginConflictError, ResolutionError
from kvferry_plugins.testing import FakeModelPlugin
from kvferry_plugins.types import RuntimeSupport

RUNTIME = "cache_transceiver_config.transceiver_runtime"
ARCHITECTURE = "AcmeForCausalLM"


def section(backend="NIXL", **fields):
    return {"cache_transceiver_config": {"backend": backend, **fields}}


def wish(runtime, name=None, architecture=ARCHITECTURE):
    return FakeModelPlugin(architecture, runtime=runtime, name=name)


class Listening:
    name = "listening"

    def __init__(self):
        self.heard = []

    @hookimpl
    def preferred_transceiver_runtime(self, architecture, pretrained_config):
        self.heard.append((architecture, pretrained_config))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cache_transceiver_config": {}},
        section(transceiver_runtime="CPP"),
        section(transceiver_runtime=None),
        section(transceiver_runtime="PYTHON"),
        {**section(), "model_loader": "external"},
    ],
)
def test_no_model_is_asked_where_its_answer_cannot_matter_and_that_is_recorded(planned, config):
    plugin = Listening()
    plan = planned(config, plugin)
    assert plugin.heard == []
    (candidate,) = plan.decision(RUNTIME).candidates
    assert candidate.reason.startswith("not asked: ")


def test_the_checkpoints_architecture_is_asked_even_where_another_executes_it(planned):
    plugin = Listening()
    planned(section(), plugin, execution="AcmeMtpDraftModel")
    assert plugin.heard == [(ARCHITECTURE, {"architectures": (ARCHITECTURE,)})]


def test_a_plugin_whose_answer_cannot_matter_cannot_fail_the_plan(planned):
    assert planned(section(transceiver_runtime="CPP"), wish("JAVA")).runtime == "CPP"


def test_a_preference_is_taken_and_logged(planned):
    plan = planned(section(), wish("PYTHON", "acme"))
    decision = plan.decision(RUNTIME)
    assert (decision.requested, decision.value, decision.source, decision.by) == ("auto", "PYTHON", "model", "acme")
    assert plan.log[0] == "Resolved transceiver_runtime='auto' to 'PYTHON' for AcmeForCausalLM."
    assert plan.providers.runtime == "runtime_python"


def test_an_explicit_choice_is_not_logged_as_resolved(planned):
    assert not any("transceiver_runtime" in line for line in planned(section(transceiver_runtime="CPP")).log)


@pytest.mark.parametrize(
    ("config", "plugins", "architecture", "word"),
    [
        (section(), [], ARCHITECTURE, "no plugin prefers a runtime for AcmeForCausalLM"),
        (section("UCX"), [wish("PYTHON")], ARCHITECTURE, "backend UCX does not run under PYTHON (NIXL does)"),
        (section(kv_transfer_timeout_ms=None), [wish("PYTHON")], ARCHITECTURE, "finite kv_transfer_timeout_ms"),
        (section(), [wish("PYTHON")], None, "no model given"),
        ({**section(), "model_loader": "external"}, [wish("PYTHON")], ARCHITECTURE, "model_loader is 'external'"),
    ],
)
def test_a_fallback_says_why(planned, config, plugins, architecture, word):
    plan = planned(config, *plugins, architecture=architecture)
    decision = plan.decision(RUNTIME)
    assert (plan.runtime, decision.value, decision.source, decision.by) == ("CPP", None, "fallback", None)
    assert word in decision.reason
    assert any(word in line and "'auto' to None" in line for line in plan.log)


def test_a_checkpoint_that_names_no_architecture_falls_back_and_says_so(planned):
    from kvferry.testing import isolated_registry

    plan = resolve(section(), model=ModelSpec(None, {}), registry=isolated_registry(), environ={})
    assert "the checkpoint names no architecture" in plan.decision(RUNTIME).reason


def test_a_preference_that_was_not_taken_is_a_losing_candidate(planned):
    (candidate,) = planned(section("UCX"), wish("PYTHON", "acme")).decision(RUNTIME).candidates
    assert (candidate.value, candidate.source, candidate.by) == ("PYTHON", "model", "acme")


def test_plugins_of_one_rank_that_agree_are_one_answer(planned):
    decision = planned(section(), wish("PYTHON", "zenith"), wish("PYTHON", "acme")).decision(RUNTIME)
    assert (decision.value, decision.by) == ("PYTHON", "acme")
    assert [candidate.by for candidate in decision.candidates] == ["zenith"]


def test_plugins_of_one_rank_that_disagree_are_named_with_the_line_that_settles_it(planned):
    with pytest.raises(PluginConflictError, match=r"prefer: \{AcmeForCausalLM: acme\}") as raised:
        planned(section(), wish("PYTHON", "zenith"), wish("CPP", "acme"))
    assert raised.value.plugins == ("acme", "zenith")
    config = {**section(), "plugins": {"prefer": {ARCHITECTURE: "zenith"}}}
    decision = planned(config, wish("PYTHON", "zenith"), wish("CPP", "acme")).decision(RUNTIME)
    assert (decision.value, decision.by) == ("PYTHON", "zenith")
    assert decision.candidates[0].reason == "plugins.prefer names zenith"


def test_a_conflict_among_those_that_lose_anyway_is_none(planned):
    from kvferry.testing import isolated_registry

    registry = isolated_registry(wish("CPP", "acme", "LlamaForCausalLM"), builtin_models=True)
    plan = planned(section(), architecture="LlamaForCausalLM", registry=registry)
    (candidate,) = plan.decision(RUNTIME).candidates
    assert (plan.runtime, candidate.by, candidate.value) == ("CPP", "llama", "PYTHON")
    assert "built-in" in candidate.reason


@pytest.mark.parametrize("answer", ["JAVA", "python", 1, True, ["PYTHON"], {}])
def test_an_answer_outside_the_vocabulary_names_plugin_and_value(planned, answer):
    with pytest.raises(HookError) as raised:
        planned(section(), wish(answer, "acme"))
    assert raised.value.plugin == "acme"
    assert repr(answer) in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"backend": "UCX", "transceiver_runtime": "PYTHON"}, [RUNTIME]),
        (
            {"transceiver_runtime": "PYTHON", "kv_transfer_timeout_ms": None},
            ["cache_transceiver_config.kv_transfer_timeout_ms"],
        ),
        (
            {"transceiver_runtime": "CPP", "enable_pipelined_transfer": True},
            ["cache_transceiver_config.enable_pipelined_transfer"],
        ),
        ({"enable_pipelined_transfer": True}, ["cache_transceiver_config.enable_pipelined_transfer"]),
    ],
)
def test_what_is_impossible_is_said_with_its_setting(planned, declare, runtime, fields, settings):
    plugin = declare("acme", runtimes=[runtime("CPP", pipelining=False)])
    with pytest.raises(ConfigError) as raised:
        planned(section(**fields), plugin)
    blockers = getattr(raised.value, "blockers", [raised.value])
    assert [error.setting for error in blockers] == settings


def test_a_runtime_that_pipelines_may(planned):
    assert planned(section(enable_pipelined_transfer=True), wish("PYTHON")).runtime == "PYTHON"


def test_a_backend_of_one_runtime_falls_back_to_that_one(planned, declare, backend):
    plugin = declare("acme", backends=[backend("WARP", {"PYTHON": RuntimeSupport()})])
    plan = planned(section("WARP"), plugin)
    decision = plan.decision(RUNTIME)
    assert (plan.runtime, decision.value, decision.source) == ("PYTHON", "PYTHON", "fallback")
    assert planned(section("WARP"), plugin, wish("CPP", "wishes")).runtime == "PYTHON"


def test_a_fallback_that_is_impossible_too_is_an_error(planned, declare, backend):
    runtimes = {"PYTHON": RuntimeSupport(needs_finite_timeout=True)}
    plugin = declare("acme", backends=[backend("WARP", runtimes)])
    with pytest.raises(ConfigError, match="finite kv_transfer_timeout_ms"):
        planned(section("WARP", kv_transfer_timeout_ms=None), plugin)


@pytest.mark.parametrize("runtime", [None, "CPP"])
def test_null_and_cpp_are_impossible_on_a_backend_that_only_runs_under_python(planned, declare, backend, runtime):
    plugin = declare("acme", backends=[backend("WARP", {"PYTHON": RuntimeSupport()})])
    with pytest.raises(ConfigError, match="does not run under CPP"):
        planned(section("WARP", transceiver_runtime=runtime), plugin)


def test_a_preference_for_a_runtime_that_is_disabled_falls_back(planned):
    registry = load_registry(toggles=Toggles(flag_layers(["no:runtime_python"])))
    plan = planned(section(), architecture="LlamaForCausalLM", registry=registry)
    assert plan.runtime == "CPP"
    assert "runtime_python" in plan.decision(RUNTIME).reason


def test_an_explicit_runtime_that_is_disabled_is_an_error(planned):
    registry = load_registry(toggles=Toggles(flag_layers(["no:runtime_python"])))
    with pytest.raises(ConfigError, match=r"runtime_python .* disabled"):
        planned(section(transceiver_runtime="PYTHON"), registry=registry)


def test_several_reasons_are_several_blockers(planned, declare, backend, runtime):
    backends = [backend("WARP", {"PYTHON": RuntimeSupport()})]
    plugin = declare("acme", backends=backends, runtimes=[runtime("CPP", pipelining=False)])
    with pytest.raises(ResolutionError) as raised:
        planned(section("WARP", transceiver_runtime="CPP", enable_pipelined_transfer=True), plugin)
    assert len(raised.value.blockers) == 2
