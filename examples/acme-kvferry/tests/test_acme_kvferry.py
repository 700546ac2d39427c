import acme_kvferry

from kvferry.dispatcher import resolve
from kvferry_plugins.testing.conformance import ModelPluginConformance

CONFIG = {"cache_transceiver_config": {"backend": "NIXL"}}


def test_acme_gets_the_python_transceiver_and_blocks_of_64_tokens(kvferry_registry):
    registry = kvferry_registry(acme_kvferry)

    plan = resolve(CONFIG, model=acme_kvferry.ARCHITECTURE, registry=registry, environ={})

    assert plan.runtime == "PYTHON"
    assert plan.effective["kv_cache_config"]["tokens_per_block"] == 64


def test_other_models_are_none_of_our_business(kvferry_registry):
    registry = kvferry_registry(acme_kvferry)

    plan = resolve(CONFIG, model="OtherForCausalLM", registry=registry, environ={})

    assert plan.runtime == "CPP"


class TestConformance(ModelPluginConformance):
    plugin = acme_kvferry
    architectures = (acme_kvferry.ARCHITECTURE,)
