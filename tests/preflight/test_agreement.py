"""What preflight calls fatal, the real handshake of two workers refuses, and nothing else."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from preflight.conftest import PRETRAINED, ScriptedBackends

from kvferry.checkpoint import ModelSpec, model_geometry
from kvferry.config import parse_engine_args
from kvferry.dispatcher import build, resolve
from kvferry.integrations.model_identity import model_identity
from kvferry.preflight.comparison import compare_sides
from kvferry.preflight.files import side_from_file
from kvferry.preflight.identity import GivenModel, model_facts
from kvferry.preflight.verdicts import Verdict
from kvferry.registry.freezing import freeze
from kvferry.testing import isolated_registry
from kvferry_plugins.errors import ConfigError, HandshakeError
from kvferry_plugins.types import Role, TransferRequest

PROMPT = tuple(range(30))
MODELS: dict[str, dict[str, Any]] = {
    "plain": PRETRAINED,
    "half": {**PRETRAINED, "dtype": "bfloat16"},
    "windows": {**PRETRAINED, "sliding_window": 24, "sliding_window_pattern": 2},
    "deeper": {**PRETRAINED, "num_hidden_layers": 5},
    "wider": {**PRETRAINED, "head_dim": 16},
    "heads": {**PRETRAINED, "num_attention_heads": 4, "num_key_value_heads": 4},
    "latent": {
        "architectures": ["FakeForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "dtype": "float32",
    },
    "state": {
        **PRETRAINED,
        "conv_L_cache": 3,
        "full_attn_idxs": [1, 3],
    },
}


@dataclass(frozen=True)
class Drawn:
    """One side, as a file and a checkpoint would have it."""

    model: str = "plain"
    weights: str = "one"
    transceiver: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)

    def written(self) -> dict[str, Any]:
        transceiver = {"backend": "SCRIPTED", "transceiver_runtime": "PYTHON", **self.transceiver}
        return {
            "cache_transceiver_config": {**transceiver, "kv_transfer_poll_interval_ms": 500},
            "kv_cache_config": {"max_tokens": 192, **self.cache},
            "device": "cpu",
        }


TRANSCEIVER = {
    "backend": ["SCRIPTED", "OTHER"],
    "kv_transfer_checksum": [True, False],
    "enable_pipelined_transfer": [True, False],
    "kv_transfer_timeout_ms": [20_000, 30_000],
}
CACHE = {
    "tokens_per_block": [4, 8, 12, 32, 48],
    "use_kv_cache_manager_v2": [True, False, "auto"],
    "dtype": ["float32", "bfloat16", "float16"],
    "max_attention_window": [[16], [12, 192]],
    "enable_block_reuse": [True, False],
}


def sections(options):
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in options.items()})


@st.composite
def pairs(draw):
    """A side, and one that is like it but for some things."""
    context = Drawn(draw(st.sampled_from(sorted(MODELS))), "one", draw(sections(TRANSCEIVER)), draw(sections(CACHE)))
    changes = draw(st.sets(st.sampled_from(["model", "weights", "transceiver", "cache"]), min_size=1, max_size=2))
    generation = Drawn(
        draw(st.sampled_from(sorted(MODELS))) if "model" in changes else context.model,
        draw(st.sampled_from(["one", "two"])) if "weights" in changes else "one",
        {**context.transceiver, **(draw(sections(TRANSCEIVER)) if "transceiver" in changes else {})},
        {**context.cache, **(draw(sections(CACHE)) if "cache" in changes else {})},
    )
    return context, generation


@pytest.fixture(scope="module")
def world(checkpoints, tmp_path_factory):
    """Plugins, plans and models of both sides, made once."""
    backends = ScriptedBackends()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        weights = {name: model_identity(folder)["weights"] for name, folder in checkpoints.items()}
        yield SimpleNamespace(registry=isolated_registry(backends), folders=checkpoints, weights=weights)


def offline(world, pair):
    """The fields that preflight calls fatal."""
    sides = []
    for role, drawn in zip(Role, pair, strict=True):
        pretrained = MODELS[drawn.model]
        given = GivenModel(world.folders[drawn.weights], ModelSpec(pretrained["architectures"][0], freeze(pretrained)))
        args = parse_engine_args(drawn.written())
        sides.append(side_from_file(role, str(role), args, registry=world.registry, environ={}, model=given))
    return {each.field for each in compare_sides(*sides) if each.verdict is Verdict.FATAL}


def worker(world, role, drawn):
    """One side, built; its manager and its transceiver."""
    pretrained = MODELS[drawn.model]
    spec = ModelSpec(pretrained["architectures"][0], freeze(pretrained))
    plan = resolve(parse_engine_args(drawn.written()), model=spec, registry=world.registry, environ={})
    cache = plan.effective["kv_cache_config"]
    windows = cache["max_attention_window"]
    facts = model_facts(GivenModel(world.folders[drawn.weights], spec))
    return build(
        plan,
        registry=world.registry,
        role=role,
        geometry=model_geometry(pretrained, cache["dtype"], max_attention_window=windows),
        model_identity={name: facts[f"model.{name}"].value for name in ("architecture", "config", "weights")},
    )


def met(world, pair):
    """The fields that a real handshake refuses, as both sides hear of it; a hand-off follows where it refuses none."""
    with ExitStack() as stack:
        parts = {}
        for role, drawn in zip(Role, pair, strict=True):
            parts[role] = worker(world, role, drawn)
            stack.callback(parts[role].shutdown)
        context, generation = parts[Role.CONTEXT], parts[Role.GENERATION]
        context.manager.allocate(1, len(PROMPT), PROMPT)
        context.manager.extend(1, len(PROMPT))
        request = TransferRequest(1, PROMPT)
        context.transceiver.respond_and_send_async(request)
        generation.manager.allocate(2, len(PROMPT) + 1, PROMPT, history_tokens=len(PROMPT))
        params = context.transceiver.get_disaggregated_params(request)
        try:
            generation.transceiver.request_and_receive_sync(TransferRequest(2, PROMPT, params=params))
        except HandshakeError as error:
            context.transceiver.cancel_request(request)
            return set(error.fields)
        return set()


@given(pairs())
@example((Drawn("windows", cache={"use_kv_cache_manager_v2": True}), Drawn("windows")))
@example((Drawn("windows"), Drawn("windows", cache={"use_kv_cache_manager_v2": True})))
@example((Drawn("state", cache={"use_kv_cache_manager_v2": True}),) * 2)
@example((Drawn(), Drawn(weights="two", transceiver={"backend": "OTHER", "kv_transfer_checksum": True})))
@example((Drawn("plain", cache={"use_kv_cache_manager_v2": True}), Drawn("state")))
@example((Drawn(cache={"tokens_per_block": 32}), Drawn(cache={"tokens_per_block": 48})))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_preflight_and_the_handshake_call_the_same_fields_fatal(world, pair):
    try:
        said = offline(world, pair)
    except ConfigError:  # a side that cannot be started, which is another test's
        assume(False)
    assert met(world, pair) == said


def test_a_pair_that_cannot_be_started_is_refused_alike_by_both(world):
    latent = Drawn("latent", cache={"use_kv_cache_manager_v2": False})
    with pytest.raises(ConfigError, match="layer 0 keeps latent"):
        offline(world, (latent, latent))
    with pytest.raises(ConfigError, match="layer 0 keeps latent"):
        worker(world, Role.CONTEXT, latent)
