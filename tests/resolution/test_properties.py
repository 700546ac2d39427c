import copy
import random

from hypothesis import given
from hypothesis import strategies as st

from kvferry.config.nested import thaw
from kvferry.dispatcher import resolve
from kvferry.resolution.selectors import SELECTORS
from kvferry.testing import isolated_registry
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.testing import FakeModelPlugin

ARCHITECTURE = "AcmeForCausalLM"

blocks = st.sampled_from([16, 32, 64])
manager = st.sampled_from([True, False, "auto"])
kv_cache = st.fixed_dictionaries(
    {},
    optional={
        "tokens_per_block": blocks,
        "use_kv_cache_manager_v2": manager,
        "enable_block_reuse": st.booleans(),
        "max_attention_window": st.lists(st.integers(1, 9), min_size=1, max_size=2),
    },
)
transceiver = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "backend": st.sampled_from([None, "DEFAULT", "NIXL", "UCX", "FOO"]),
        "transceiver_runtime": st.sampled_from(["auto", "CPP", "PYTHON", None]),
        "kv_transfer_timeout_ms": st.none() | st.integers(1, 9),
        "max_tokens_in_buffer": st.sampled_from([None, 64]),
    },
)
configs = st.fixed_dictionaries(
    {},
    optional={
        "kv_cache_config": kv_cache,
        "cache_transceiver_config": transceiver,
        "model_loader": st.sampled_from(["pytorch", "external"]),
    },
)
models = st.lists(
    st.builds(
        lambda runtime, defaults: {"runtime": runtime, "defaults": defaults},
        st.sampled_from([None, "CPP", "PYTHON"]),
        st.none() | st.fixed_dictionaries({}, optional={"kv_cache_config": kv_cache, "max_batch_size": st.just(4)}),
    ),
    max_size=3,
)
environments = st.dictionaries(st.sampled_from([name for name, _ in SELECTORS]), st.sampled_from(["1", "0", "true"]))


def outcome(config, plugins, environ):
    """The plan, or what stands in its way, as comparable values."""
    registry = isolated_registry(*plugins)
    try:
        return resolve(config, model=ARCHITECTURE, registry=registry, environ=environ)
    except KvferryError as error:
        return [(type(one), str(one)) for one in getattr(error, "blockers", [error])]


def fakes(wishes):
    return [FakeModelPlugin(ARCHITECTURE, name=f"plugin{number}", **wish) for number, wish in enumerate(wishes)]


@given(configs, models, environments)
def test_resolving_twice_gives_the_same_plan_and_edits_nothing(config, wishes, environ):
    before = copy.deepcopy((config, wishes, environ))
    assert outcome(config, fakes(wishes), environ) == outcome(config, fakes(wishes), environ)
    assert (config, wishes, environ) == before


@given(configs, models, environments, st.randoms(use_true_random=False))
def test_the_order_of_plugins_changes_nothing(config, wishes, environ, shuffle: random.Random):
    plugins = fakes(wishes)
    shuffled = list(plugins)
    shuffle.shuffle(shuffled)
    assert outcome(config, plugins, environ) == outcome(config, shuffled, environ)


@given(configs, models, environments)
def test_the_effective_configuration_resolves_to_itself(config, wishes, environ):
    plan = outcome(config, fakes(wishes), environ)
    if isinstance(plan, list):
        return
    again = outcome(thaw(plan.effective), fakes(wishes), environ)
    assert again.effective == plan.effective
    assert (again.manager, again.backend, again.runtime) == (plan.manager, plan.backend, plan.runtime)
    assert again.providers == plan.providers


@given(configs, models)
def test_what_the_user_wrote_is_kept(config, wishes):
    plan = outcome(config, fakes(wishes), {})
    if isinstance(plan, list):
        return
    for key, value in config.get("kv_cache_config", {}).items():
        if key != "use_kv_cache_manager_v2" or value != "auto":
            kept = plan.effective["kv_cache_config"][key]
            assert kept == (tuple(value) if isinstance(value, list) else value)


@given(configs, models, environments)
def test_every_decision_holds_what_the_configuration_holds_afterwards(config, wishes, environ):
    plan = outcome(config, fakes(wishes), environ)
    if isinstance(plan, list):
        return
    for decision in plan.decisions:
        section, _, name = decision.setting.rpartition(".")
        held = plan.effective[section] if section else plan.effective
        if held is not None:
            assert held[name] == decision.value
