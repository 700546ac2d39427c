import pytest

from kvferry.dispatcher import resolve
from kvferry.registry.records import Origin
from kvferry.testing import isolated_registry

PYTHON = ["LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"]
LATENTS = [
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
]
STATES = [
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
]
SILENT = [
    "MistralForCausalLM",
    "MistralLarge3ForCausalLM",
    "Llama4ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForCausalLM",
    "NemotronHForCausalLM",
    "MiniMaxM2ForCausalLM",
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


@pytest.mark.parametrize("architecture", [*LATENTS, *STATES, "KimiLinearForCausalLM"])
def test_what_v1_has_no_room_for_prefers_python_and_defaults_to_manager_v2(registry, architecture):
    (answer,) = registry.preferred_transceiver_runtime(architecture, None)
    assert answer.value == "PYTHON"
    (answer,) = registry.model_defaults(architecture, None, None)
    expected = {"use_kv_cache_manager_v2": True}
    if architecture not in LATENTS:
        expected["enable_block_reuse"] = False
    if architecture == "KimiLinearForCausalLM":
        expected["tokens_per_block"] = 64
    assert answer.value == {"kv_cache_config": expected}


def test_deepseek_v4_defaults_to_manager_v2_and_has_no_wish_for_a_runtime(registry):
    (answer,) = registry.model_defaults("DeepseekV4ForCausalLM", None, None)
    assert answer.value == {"kv_cache_config": {"use_kv_cache_manager_v2": True}}
    assert registry.preferred_transceiver_runtime("DeepseekV4ForCausalLM", None) == []


@pytest.mark.parametrize("architecture", SILENT)
def test_these_have_no_opinion(registry, architecture):
    assert registry.preferred_transceiver_runtime(architecture, None) == []
    assert registry.model_defaults(architecture, None, None) == []


@pytest.mark.parametrize("architecture", [*PYTHON, *LATENTS, *STATES, "DeepseekV4ForCausalLM", "MistralForCausalLM"])
def test_a_built_in_opinion_resolves(registry, architecture):
    config = {"cache_transceiver_config": {"backend": "NIXL"}}
    plan = resolve(config, model=architecture, registry=registry, environ={})
    assert plan.runtime == ("PYTHON" if architecture in (*PYTHON, *LATENTS, *STATES) else "CPP")
    assert plan.manager == ("V1" if architecture in (*PYTHON, "MistralForCausalLM") else "V2")


def test_every_family_is_an_entry_point_of_our_own_and_documents_its_facts(registry):
    import importlib

    families = {record.name: record for record in registry.records() if "models_plugins" in record.entry_point}
    assert set(families) == {"deepseek", "gemma", "glm", "gpt_oss", "kimi", "llama", "mistral", "qwen"}
    for record in families.values():
        assert record.origin is Origin.BUILTIN
        assert "#" in importlib.import_module(record.entry_point).__doc__
