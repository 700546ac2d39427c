import pytest

from kvferry.dispatcher import resolve
from kvferry.registry.records import Origin
from kvferry.testing import isolated_registry

PYTHON = ["LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "KimiK25ForConditionalGeneration"]
SILENT = [
    "MistralForCausalLM",
    "Llama4ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "DeepseekV3ForCausalLM",
    "KimiLinearForCausalLM",
    "MyLlamaForCausalLM",
    "llamaforcausallm",
    "",
]


@pytest.fixture(scope="module")
def registry():
    return isolated_registry(builtin_models=True)


@pytest.mark.parametrize("architecture", PYTHON)
def test_these_prefer_the_python_runtime_and_nothing_else(registry, architecture):
    (answer,) = registry.preferred_transceiver_runtime(architecture, None)
    assert answer.value == "PYTHON"
    assert registry.model_defaults(architecture, None, None) == []


def test_deepseek_v4_defaults_to_manager_v2_and_has_no_wish_for_a_runtime(registry):
    (answer,) = registry.model_defaults("DeepseekV4ForCausalLM", None, None)
    assert answer.value == {"kv_cache_config": {"use_kv_cache_manager_v2": True}}
    assert registry.preferred_transceiver_runtime("DeepseekV4ForCausalLM", None) == []


@pytest.mark.parametrize("architecture", SILENT)
def test_these_have_no_opinion(registry, architecture):
    assert registry.preferred_transceiver_runtime(architecture, None) == []
    assert registry.model_defaults(architecture, None, None) == []


@pytest.mark.parametrize("architecture", [*PYTHON, "DeepseekV4ForCausalLM", "MistralForCausalLM"])
def test_a_built_in_opinion_resolves(registry, architecture):
    config = {"cache_transceiver_config": {"backend": "NIXL"}}
    plan = resolve(config, model=architecture, registry=registry, environ={})
    assert plan.runtime == ("PYTHON" if architecture in PYTHON else "CPP")
    assert plan.manager == ("V2" if architecture.startswith("Deepseek") else "V1")


def test_every_family_is_an_entry_point_of_our_own_and_documents_its_facts(registry):
    import importlib

    families = {record.name: record for record in registry.records() if "models_plugins" in record.entry_point}
    assert set(families) == {"deepseek", "gemma", "gpt_oss", "kimi", "llama", "mistral"}
    for record in families.values():
        assert record.origin is Origin.BUILTIN
        assert "#" in importlib.import_module(record.entry_point).__doc__
