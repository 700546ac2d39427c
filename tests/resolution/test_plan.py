import pytest

from kvferry.checkpoint import ModelSpec
from kvferry.config import EngineArgs
from kvferry.dispatcher import resolve
from kvferry.registry.load import load_registry
from kvferry.registry.toggles import Toggles, flag_layers
from kvferry.testing import isolated_registry
from kvferry_plugins.errors import ConfigError, HookError, PluginLoadError, ResolutionError
from kvferry_plugins.testing import FakeModelPlugin

ON = {"cache_transceiver_config": {"backend": "NIXL"}}


def test_the_decisions_stand_in_the_order_of_the_steps(planned):
    defaults = FakeModelPlugin("AcmeForCausalLM", defaults={"max_batch_size": 4})
    plan = planned({**ON, "kv_cache_config": {"dtype": "float16"}}, defaults)
    assert [decision.setting.rpartition(".")[2] for decision in plan.decisions] == [
        "backend",
        "dtype",
        "max_batch_size",
        "transceiver_runtime",
        "use_kv_cache_manager_v2",
    ]


def test_every_blocker_is_reported_in_the_order_of_the_steps(planned):
    wrong = FakeModelPlugin("AcmeForCausalLM", runtime="JAVA", defaults={"x": 1}, name="acme")
    config = {
        "cache_transceiver_config": {"backend": "FOO", "max_tokens_in_buffer": 33},
        "plugins": {"prefer": {"UCX": "nobody"}},
    }
    with pytest.raises(ResolutionError) as raised:
        planned(config, wrong)
    assert [type(error) for error in raised.value.blockers] == [
        ConfigError,
        ConfigError,
        HookError,
        ConfigError,
        HookError,
    ]
    words = ("nobody", "FOO", "model_defaults", "max_tokens_in_buffer", "JAVA")
    for word, error in zip(words, raised.value.blockers, strict=True):
        assert word in str(error)
        assert word in str(raised.value)


def test_one_blocker_is_raised_as_itself(planned):
    with pytest.raises(ConfigError) as raised:
        planned({"cache_transceiver_config": {"backend": "FOO"}})
    assert not isinstance(raised.value, ResolutionError)


def test_a_preferred_plugin_that_is_not_active_is_an_error(planned):
    registry = load_registry(toggles=Toggles(flag_layers(["no:ucx"])))
    with pytest.raises(PluginLoadError, match="-p no:ucx") as raised:
        planned({"plugins": {"prefer": {"UCX": "ucx"}}}, registry=registry)
    assert raised.value.plugin == "ucx"


def test_a_preferred_plugin_may_be_named_with_its_distribution(planned):
    assert planned({"plugins": {"prefer": {"UCX": "kvferry:ucx"}}}).manager == "V1"


def test_the_plan_cannot_be_changed(planned):
    plan = planned({"kv_cache_config": {"max_attention_window": [4, 8]}})
    with pytest.raises(TypeError):
        plan.effective["kv_cache_config"]["dtype"] = "float16"
    assert plan.effective["kv_cache_config"]["max_attention_window"] == (4, 8)


def test_a_model_may_be_a_name_a_folder_a_file_or_nothing(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    registry = isolated_registry(builtin_models=True)
    models = ["LlamaForCausalLM", tmp_path, str(tmp_path), tmp_path / "config.json", ModelSpec("LlamaForCausalLM")]
    plans = [resolve(ON, model=model, registry=registry, environ={}) for model in models]
    assert {plan.runtime for plan in plans} == {"PYTHON"}
    assert resolve(ON, model=None, registry=registry, environ={}).architecture is None
    with pytest.raises(ConfigError, match="cannot read"):
        resolve(ON, model="./LlamaForCausalLM", registry=registry, environ={})


def test_a_configuration_may_be_a_mapping_or_engine_args():
    registry = isolated_registry()
    plans = [resolve(args, model=None, registry=registry, environ={}) for args in ({}, EngineArgs())]
    assert plans[0] == plans[1]


def test_a_mapping_that_breaks_the_schema_is_a_config_error():
    with pytest.raises(ConfigError, match="did you mean 'kv_cache_config'"):
        resolve({"kv_cache": {}}, model=None, registry=isolated_registry(), environ={})


def test_the_plan_names_both_architectures(planned):
    plan = planned({}, execution="AcmeMtpDraftModel")
    assert (plan.architecture, plan.execution_architecture) == ("AcmeForCausalLM", "AcmeMtpDraftModel")
    assert planned({}).execution_architecture == "AcmeForCausalLM"
