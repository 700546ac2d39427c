"""Our own model plugins run the suite that we hand to others."""

import importlib

import pytest

from kvferry_plugins.testing.conformance import ModelPluginConformance

FAMILIES = {
    "deepseek": (("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"), ()),
    "gemma": (("Gemma3ForCausalLM",), ("Gemma3ForConditionalGeneration",)),
    "glm": (("GlmMoeDsaForCausalLM",), ()),
    "gpt_oss": (("GptOssForCausalLM",), ()),
    "kimi": (("KimiK25ForConditionalGeneration", "KimiLinearForCausalLM"), ()),
    "llama": (("LlamaForCausalLM",), ("Llama4ForConditionalGeneration",)),
    "mistral": ((), ("MistralForCausalLM", "MistralLarge3ForCausalLM")),
    "qwen": (
        (
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        (),
    ),
}


def suite(family: str) -> type[ModelPluginConformance]:
    architectures, silent = FAMILIES[family]
    plugin = importlib.import_module(f"kvferry_models_plugins.{family}")
    known = {"plugin": plugin, "architectures": architectures, "silent": silent, "entry_point": family}
    return type(f"Test_{family}", (ModelPluginConformance,), known)


for each in FAMILIES:
    globals()[f"Test_{each}"] = suite(each)


def test_every_model_plugin_of_ours_runs_it():
    points = importlib.metadata.entry_points(group="kvferry")
    assert {each.name for each in points if each.module.startswith("kvferry_models_plugins.")} == set(FAMILIES)
    assert all(f"Test_{each}" in globals() for each in FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_suite_asks_about_all_that_a_family_knows(family):
    assert sum(map(len, FAMILIES[family])) > 0
