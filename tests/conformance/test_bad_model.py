"""The suite for model plugins finds each fault that is planted in one, at the right check, and says which it is."""

import pytest
from conformance.bad_model import FAULTS, source
from conformance.planted import run_suites

EXPECTED = {
    "misspelt hook": ("test_every_hook_exists", "kvferry has no hook prefered_transceiver_runtime"),
    "unknown argument": ("test_every_hook_exists", "hook 'model_defaults' has no argument 'checkpoint'"),
    "unknown runtime": ("test_its_answers_are_in_the_vocabulary", "answered 'RUST', which is not 'PYTHON', 'CPP'"),
    "turns disaggregation on": (
        "test_its_answers_are_in_the_vocabulary",
        "only the user sets cache_transceiver_config",
    ),
    "unknown setting": ("test_its_defaults_are_a_configuration", "block_tokens"),
    "wrong type": ("test_its_defaults_are_a_configuration", "tokens_per_block"),
    "no section": ("test_its_defaults_are_a_configuration", "kv_cache_config = None is of no setting"),
    "asks the environment": ("test_it_does_nothing_beside[asking-environment]", "by the environment: it reads BAD"),
    "not plain": ("test_its_defaults_are_a_configuration", "kv_cache_config.tokens_per_block is <class 'object'>"),
    "dice": ("test_the_same_question_gets_the_same_answer", "and asked again"),
    "needs a config": ("test_it_has_the_opinions", "raised TypeError: 'NoneType' object is not subscriptable"),
    "changes its arguments": ("test_it_leaves_its_arguments", "changed its argument pretrained_config"),
    "subclasses too": ("test_it_answers_for_no_other_architecture", "though it is none of its architectures"),
    "no opinion": ("test_it_has_the_opinions", "no hook has an opinion on 'BadForCausalLM'"),
    "imports torch": ("test_it_does_nothing_beside[importing-heavy libraries]", "imported torch"),
    "prints": ("test_it_does_nothing_beside[importing-output]", "wrote 22 bytes to standard output"),
    "prints when asked": ("test_it_does_nothing_beside[asking-output]", "to standard output"),
    "changes the environment": (
        "test_it_does_nothing_beside[importing-environment]",
        "changed the environment: UCX_TLS",
    ),
    "starts a thread": ("test_it_does_nothing_beside[importing-threads]", "started a thread: bad-watcher"),
    "forks": ("test_it_does_nothing_beside[importing-processes]", "started a process (os.fork"),
    "changes the folder": (
        "test_it_does_nothing_beside[importing-settings of the process]",
        "changed the working folder to '/'",
    ),
    "writes a file": ("test_it_does_nothing_beside[importing-files]", "bad.log"),
    "resolves a name": ("test_it_does_nothing_beside[importing-network]", "socket.getaddrinfo"),
    "raises where others are": ("test_explain_says_the_same", "decides otherwise"),
    "dies at import": ("test_importing_and_asking_it_ends_well", "ended with status 3"),
    "dies when asked": ("test_importing_and_asking_it_ends_well", "ended with status 4"),
    "hangs when asked": ("test_importing_and_asking_it_ends_well", "did not end within 10 s"),
    "exits when asked": ("test_it_has_the_opinions", "raised SystemExit: no config"),
    "answers megabytes": ("test_its_answers_are_in_the_vocabulary", "… (6000002 characters), which is not 'PYTHON'"),
    "no such entry point": ("test_the_entry_point_leads_to_it", "has an entry point named 'bad' in the group kvferry"),
}

SUITES = """
from kvferry_plugins.testing.conformance import ModelPluginConformance
"""
SUITE = """
import {module}
class Test_{module}(ModelPluginConformance):
    plugin = {module}
    architectures = ("BadForCausalLM",)
    entry_point = {entry_point}
    patience = {patience}
"""


INSTANCE = """
from kvferry_plugins.testing import FakeModelPlugin
defaults = {"kv_cache_config": {"tokens_per_block": 64}}
plugin = FakeModelPlugin("AcmeForCausalLM", runtime="PYTHON", defaults=defaults)
"""
INSTANCE_SUITE = """
import acme_instance
from kvferry_plugins.testing.conformance import ModelPluginConformance
class TestInstance(ModelPluginConformance):
    plugin = acme_instance.plugin
    reference = "acme_instance:plugin"
    architectures = ("AcmeForCausalLM",)
    entry_point = None
"""


def module_of(fault):
    return "bad_" + (fault or "nothing").replace(" ", "_")


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Fault (None: the healthy one) → test → why it failed, of all plugins in one run."""
    folder = tmp_path_factory.mktemp("bad_models")
    text = SUITES
    for fault in (None, *FAULTS):
        module = module_of(fault)
        (folder / f"{module}.py").write_text(source(fault))
        entry_point = "'bad'" if fault == "no such entry point" else None
        patience = 10.0 if fault == "hangs when asked" else 120.0
        text += SUITE.format(module=module, entry_point=entry_point, patience=patience)
    (folder / "test_bad.py").write_text(text)
    found = run_suites(folder)
    return {
        fault: {name: why for name, why in found[f"Test_{module_of(fault)}"].items() if why is not None}
        for fault in (None, *FAULTS)
    }


def test_without_a_fault_it_passes(failures):
    assert failures[None] == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(failures, fault):
    check, message = EXPECTED[fault]
    found = {name: why for name, why in failures[fault].items() if name.startswith(check)}
    assert found, f"{check} passed; failed: {list(failures[fault])}"
    assert any(message in why for why in found.values()), found
    assert max(len(why) for why in found.values()) < 100_000


@pytest.mark.parametrize(
    "conftest", ["", "import sys; sys.modules['kvferry'] = None"], ids=["kvferry", "contract alone"]
)
def test_a_plugin_that_is_an_instance_passes_with_kvferry_and_without(tmp_path, conftest):
    (tmp_path / "acme_instance.py").write_text(INSTANCE)
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_instance.py").write_text(INSTANCE_SUITE)
    found = run_suites(tmp_path)["TestInstance"]
    assert len(found) == 28
    assert {name: why for name, why in found.items() if why is not None} == {}
