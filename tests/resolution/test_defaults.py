import pytest

from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.errors import ConfigError, HookError, PluginConflictError, ResolutionError
from kvferry_plugins.testing import FakeModelPlugin

ARCHITECTURE = "AcmeForCausalLM"
BLOCK = "kv_cache_config.tokens_per_block"


def defaults(values, name=None, architecture=ARCHITECTURE):
    return FakeModelPlugin(architecture, defaults=values, name=name)


def blocks(tokens, **more):
    return {"kv_cache_config": {"tokens_per_block": tokens, **more}}


class Listening:
    name = "listening"

    def __init__(self):
        self.heard = []

    @hookimpl
    def model_defaults(self, architecture, pretrained_config, engine_args):
        self.heard.append((architecture, pretrained_config, engine_args))


def test_the_execution_architecture_is_asked_with_what_the_user_wrote(planned):
    plugin = Listening()
    planned({"kv_cache_config": {}, "max_batch_size": 4}, plugin, execution="AcmeMtpDraftModel")
    assert plugin.heard == [("AcmeMtpDraftModel", {"architectures": (ARCHITECTURE,)}, {"max_batch_size": 4})]


def test_no_model_is_asked_without_an_architecture_or_with_an_external_loader(planned):
    plugin = Listening()
    planned({}, plugin, architecture=None)
    planned({"model_loader": "external"}, plugin)
    assert plugin.heard == []


def test_what_is_handed_to_a_plugin_cannot_be_changed(planned):
    class Meddling:
        name = "meddling"

        @hookimpl
        def model_defaults(self, engine_args):
            engine_args["kv_cache_config"]["tokens_per_block"] = 1

    with pytest.raises(HookError, match="meddling"):
        planned(blocks(32), Meddling())


def test_a_default_fills_what_the_user_left_and_says_who(planned):
    plan = planned({}, defaults(blocks(64), "acme"))
    decision = plan.decision(BLOCK)
    assert (decision.requested, decision.value, decision.source, decision.by) == (32, 64, "model", "acme")
    assert plan.effective["kv_cache_config"]["tokens_per_block"] == 64


def test_what_the_user_wrote_wins_and_the_models_wish_is_a_candidate(planned):
    decision = planned(blocks(32), defaults(blocks(64), "acme")).decision(BLOCK)
    assert (decision.value, decision.source) == (32, "user")
    assert [(one.value, one.by) for one in decision.candidates] == [(64, "acme")]


def test_a_conflict_about_what_the_user_wrote_is_none(planned):
    both = defaults(blocks(64), "acme"), defaults(blocks(16), "zenith")
    assert planned(blocks(32), *both).effective["kv_cache_config"]["tokens_per_block"] == 32


def test_every_disagreement_is_reported(planned):
    first = defaults(blocks(64, enable_block_reuse=True), "acme")
    second = defaults(blocks(16, enable_block_reuse=False), "zenith")
    with pytest.raises(ResolutionError) as raised:
        planned({}, first, second)
    assert all(isinstance(error, PluginConflictError) for error in raised.value.blockers)
    assert ["enable_block_reuse" in str(raised.value.blockers[0]), BLOCK in str(raised.value.blockers[1])] == [
        True,
        True,
    ]


def test_ranks_are_compared_key_by_key(planned):
    built_in = "DeepseekV4ForCausalLM"
    registry = isolated_registry(defaults(blocks(64), "acme", built_in), builtin_models=True)
    plan = planned({}, architecture=built_in, registry=registry)
    assert plan.manager == "V2"
    assert plan.effective["kv_cache_config"]["tokens_per_block"] == 64


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"kv_cache_config": {"tokens_per_blok": 64}}, "tokens_per_block"),
        ({"kv_cache_config": {"tokens_per_block": "64"}}, "valid integer"),
        ({"kv_cache_config": 3}, "section"),
        ({"cache_transceiver_config": {"backend": "NIXL"}}, "cache_transceiver_config"),
        ({"cache_transceiver_config": None}, "cache_transceiver_config"),
        ({"cache_transceiver_config.backend": "NIXL"}, "cache_transceiver_config"),
        ({"kv_cache_config.tokens_per_block": 64}, "nest sections"),
        ({"plugins": {"enable": ["x"]}}, "plugins"),
        ({"peers": []}, "peers"),
        ({"model_loader": "external"}, "model_loader"),
        ({1: 2}, "1"),
        (["kv_cache_config"], "mapping"),
        ("PYTHON", "mapping"),
    ],
    ids=str,
)
def test_defaults_outside_the_schema_name_plugin_and_key(planned, values, word):
    with pytest.raises(HookError, match="acme") as raised:
        planned({}, defaults(values, "acme"))
    assert (raised.value.hook, raised.value.plugin) == ("model_defaults", "acme")
    assert word in str(raised.value)


def test_everything_that_is_wrong_with_defaults_is_reported_at_once(planned):
    wrong = {"cache_transceiver_config": {}, "kv_cache_config": {"tokens_per_block": 0, "dtype": "x"}}
    with pytest.raises(ResolutionError) as raised:
        planned({}, defaults(wrong, "acme"), defaults({"x": 1}, "zenith"))
    assert len(raised.value.blockers) == 4
    assert {error.plugin for error in raised.value.blockers} == {"acme", "zenith"}


def test_a_buffer_is_checked_against_the_block_size_that_a_model_chose(planned):
    config = {"cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 96}}
    assert planned(config).backend == "UCX"
    with pytest.raises(ConfigError, match="a default of acme") as raised:
        planned(config, defaults(blocks(64), "acme"))
    assert raised.value.setting == "cache_transceiver_config.max_tokens_in_buffer"
    assert "64 and 128" in str(raised.value)


def test_a_disk_cache_needs_a_folder(planned):
    with pytest.raises(ConfigError, match="disk_cache_path"):
        planned({"kv_cache_config": {"disk_cache_size": 1}})
    assert planned({"kv_cache_config": {"disk_cache_size": 0}}).manager == "V1"


def test_a_folder_for_a_disk_cache_needs_a_size(planned):
    with pytest.raises(ConfigError, match="/fast") as raised:
        planned({"kv_cache_config": {"disk_cache_path": "/fast"}})
    assert raised.value.setting == "kv_cache_config.disk_cache_size"
    assert planned({"kv_cache_config": {"disk_cache_path": "/fast", "disk_cache_size": 0}}).warnings == ()
