"""Each field of the handshake gets a verdict; what a file cannot tell is unknown, never fine."""

from dataclasses import replace

import pytest
from preflight.conftest import ON, PRETRAINED, WINDOWED

from kvferry.preflight.comparison import compare_sides
from kvferry.preflight.sides import unknown
from kvferry.preflight.verdicts import Verdict
from kvferry.transceiver.fingerprint import GEOMETRY, SEVERITY
from kvferry_plugins import hookimpl
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.testing import FakeModelPlugin
from kvferry_plugins.types import ManagerKind

INSTALLATION = {"protocol", "libraries", "plugins", "plugins.digest"}
V2 = {"use_kv_cache_manager_v2": True}
V1 = {"use_kv_cache_manager_v2": False}


def verdicts(pair):
    return {each.field: each for each in compare_sides(*pair)}


def named(pair, verdict):
    return {name for name, each in verdicts(pair).items() if each.verdict is verdict}


def transceiver(**settings):
    return {"cache_transceiver_config": {**ON, **settings}}


def cache(**settings):
    return {"kv_cache_config": settings}


def test_two_equal_files_leave_open_only_what_the_installation_decides(kit):
    pair = kit.pair()
    assert named(pair, Verdict.UNKNOWN) == INSTALLATION
    assert named(pair, Verdict.FINE) == set(SEVERITY) - INSTALLATION
    assert all("running worker's address" in verdicts(pair)[name].reason for name in INSTALLATION)


def test_without_a_model_nothing_of_it_is_fine(kit):
    pair = kit.pair(given=False)
    model = {"model.architecture", "model.config", "model.weights", *GEOMETRY}
    assert named(pair, Verdict.UNKNOWN) == INSTALLATION | model
    assert all("--model" in verdicts(pair)[name].reason for name in model)
    assert named(pair, Verdict.FATAL) == set()


@pytest.mark.parametrize(
    ("context", "generation", "field", "values", "lines"),
    [
        (
            transceiver(backend="SCRIPTED"),
            transceiver(backend="OTHER"),
            "backend",
            ("SCRIPTED", "OTHER"),
            ("cache_transceiver_config: {backend: SCRIPTED}", "cache_transceiver_config: {backend: OTHER}"),
        ),
        (
            cache(tokens_per_block=32),
            cache(tokens_per_block=48),
            "tokens_per_block",
            (32, 48),
            ("kv_cache_config: {tokens_per_block: 32}", "kv_cache_config: {tokens_per_block: 48}"),
        ),
        (
            cache(dtype="float16"),
            cache(dtype="bfloat16"),
            "dtype",
            ("float16", "bfloat16"),
            ("kv_cache_config: {dtype: float16}", "kv_cache_config: {dtype: bfloat16}"),
        ),
        (
            transceiver(kv_transfer_checksum=True),
            {},
            "checksum",
            (True, False),
            (
                "cache_transceiver_config: {kv_transfer_checksum: true}",
                "cache_transceiver_config: {kv_transfer_checksum: false}",
            ),
        ),
    ],
    ids=["backend", "tokens_per_block", "dtype", "checksum"],
)
def test_a_fatal_field_says_the_line_that_mends_it_on_either_side(kit, context, generation, field, values, lines):
    pair = kit.pair(context, generation)
    assert named(pair, Verdict.FATAL) == {field}
    found = verdicts(pair)[field]
    assert (found.context, found.generation) == values
    assert [(change.where, change.line) for change in found.changes] == [
        ("generation.yaml", lines[0]),
        ("context.yaml", lines[1]),
    ]


@pytest.mark.parametrize(
    ("context", "generation", "fatal"),
    [(V2, V1, {"windows"}), (V1, V2, set()), (V2, V2, set()), (V1, V1, set())],
    ids=["V2 to V1", "V1 to V2", "V2", "V1"],
)
def test_a_context_side_that_gives_blocks_back_serves_no_generation_side_that_wants_them(
    kit, context, generation, fatal
):
    pair = kit.pair(cache(**context), cache(**generation), pretrained=WINDOWED)
    assert named(pair, Verdict.FATAL) == fatal
    if fatal:
        assert [change.line for change in verdicts(pair)["windows"].changes] == [
            "kv_cache_config: {use_kv_cache_manager_v2: true}",
            "kv_cache_config: {use_kv_cache_manager_v2: false}",
        ]


def test_a_narrower_window_at_the_context_side_is_fatal_and_says_the_windows(kit):
    pair = kit.pair(cache(**V2, max_attention_window=[32]), cache(**V2, max_attention_window=[64]))
    found = verdicts(pair)["windows"]
    assert (found.verdict, found.context, found.generation) == (Verdict.FATAL, 32, 64)
    assert found.changes[0].line == "kv_cache_config: {max_attention_window: [32]}"
    assert named(kit.pair(*[cache(**V2, max_attention_window=[64])] * 2), Verdict.FATAL) == set()


def test_rows_that_are_wider_for_their_dtype_alone_are_mended_by_the_dtype(kit):
    pair = kit.pair(cache(dtype="float16"), {})
    assert named(pair, Verdict.FATAL) == {"dtype", "roles"}
    found = verdicts(pair)
    assert found["roles"].changes == found["dtype"].changes


def test_another_checkpoint_is_another_model(kit):
    pair = kit.side("context", weights="one"), kit.side("generation", weights="two")
    assert named(pair, Verdict.FATAL) == {"model.weights"}
    changes = verdicts(pair)["model.weights"].changes
    assert [str(pair[0].model) in changes[0].line, str(pair[1].model) in changes[1].line] == [True, True]


def test_another_geometry_is_refused_field_by_field(kit):
    deeper = {**PRETRAINED, "num_hidden_layers": 6, "num_key_value_heads": 1}
    pair = kit.side("context"), kit.side("generation", pretrained=deeper)
    assert named(pair, Verdict.FATAL) == {"model.config", "layers", "kv_heads"}


def test_block_sizes_that_do_not_fit_are_fatal_whatever_the_model(kit):
    pair = kit.pair(cache(tokens_per_block=32), cache(tokens_per_block=48), given=False)
    assert named(pair, Verdict.FATAL) == {"tokens_per_block"}
    assert named(kit.pair(cache(tokens_per_block=32), cache(tokens_per_block=64), given=False), Verdict.FATAL) == set()


def test_a_dtype_that_both_files_name_is_known_without_a_model(kit):
    pair = kit.pair(cache(dtype="float16"), cache(dtype="bfloat16"), given=False)
    assert named(pair, Verdict.FATAL) == {"dtype"}
    assert "dtype" in named(kit.pair(*[cache(dtype="float16")] * 2, given=False), Verdict.FINE)
    assert "dtype" in named(kit.pair(cache(dtype="float16"), {}, given=False), Verdict.UNKNOWN)


def test_a_backend_that_the_environment_decides_is_unknown_although_it_is_the_same_here(kit):
    asks = {"cache_transceiver_config": {"backend": "DEFAULT", "transceiver_runtime": "CPP"}}
    pair = kit.pair(asks, asks)
    found = verdicts(pair)["backend"]
    assert (found.verdict, found.context, found.generation) == (Verdict.UNKNOWN, "NIXL", "NIXL")
    assert "cache_transceiver_config.backend: NIXL" in found.reason
    told = {**asks, "cache_transceiver_config": {"backend": "UCX", "transceiver_runtime": "CPP"}}
    assert verdicts(kit.pair(asks, told))["backend"].verdict is Verdict.FATAL
    chosen = kit.pair(asks, told, environ={"TRTLLM_USE_UCX_KVCACHE": "1"})
    assert verdicts(chosen)["backend"].verdict is Verdict.UNKNOWN


def test_a_runtime_that_a_model_may_prefer_is_unknown_without_one(kit):
    asks = {"cache_transceiver_config": {"backend": "NIXL"}}
    assert verdicts(kit.pair(asks, asks, given=False))["runtime"].verdict is Verdict.UNKNOWN
    assert verdicts(kit.pair(asks, asks))["runtime"].verdict is Verdict.FINE
    other = {"cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": "PYTHON"}}
    found = verdicts(kit.pair(asks, other))["runtime"]
    assert (found.verdict, found.context, found.generation) == (Verdict.INFORMATION, "CPP", "PYTHON")


@pytest.mark.parametrize("sides", [("context",), ("generation",), ("context", "generation")], ids="+".join)
def test_a_transceiver_that_is_off_is_fatal(kit, sides):
    off = {"cache_transceiver_config": None}
    pair = kit.pair(*[off if side in sides else {} for side in ("context", "generation")])
    found = verdicts(pair)["backend"]
    assert found.verdict is Verdict.FATAL
    assert [value is None for value in (found.context, found.generation)] == [
        side in sides for side in ("context", "generation")
    ]


def test_one_config_json_without_weights_for_both_sides_is_one_model(kit, tmp_path):
    bare = tmp_path / "config.json"
    bare.write_text("{}")
    pair = [kit.side(role) for role in ("context", "generation")]
    facts = [{**side.facts, "model.weights": unknown("no weights")} for side in pair]
    same = [replace(side, facts=each, model=bare) for side, each in zip(pair, facts, strict=True)]
    assert verdicts(same)["model.weights"].verdict is Verdict.FINE
    others = [same[0], replace(same[1], model=tmp_path / "other.json")]
    assert verdicts(others)["model.weights"].verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)], ids=str)
def test_instances_of_several_ranks_are_compared_as_a_whole(kit, tensor, pipeline):
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    assert named(kit.pair(ranks, {}), Verdict.FATAL) == set()
    assert len(kit.side("context", ranks).layouts) == tensor * pipeline
    deeper = {**PRETRAINED, "num_hidden_layers": 6}
    pair = kit.side("context", ranks), kit.side("generation", pretrained=deeper)
    assert named(pair, Verdict.FATAL) == {"model.config", "layers"}


def test_a_manager_whose_plugin_plans_no_layout_leaves_its_geometry_open(kit):
    class OwnManager:
        name = "own"

        @hookimpl
        def kv_cache_managers(self):
            return (ManagerKind("V1", "OwnManager"),)

        @hookimpl
        def create_kv_cache_manager(self, spec) -> KVCacheManager:
            raise AssertionError("nothing is built")

    pair = kit.pair(plugins=[OwnManager()])
    assert named(pair, Verdict.UNKNOWN) == INSTALLATION | set(GEOMETRY)
    assert "manager V1 declares no layout" in verdicts(pair)["layers"].reason


def test_plugins_that_one_side_leaves_out_are_a_warning_that_says_how_to_turn_them_on(kit):
    pair = kit.side("context", plugins=[FakeModelPlugin("A", name="acme")]), kit.side("generation")
    found = verdicts(pair)["plugins"]
    assert (found.verdict, found.context, found.generation) == (Verdict.WARNING, {"acme": "(injected)"}, {})
    assert [change.line for change in found.changes] == [
        "plugins: {enable: [acme]}, in the place of what disables it",
        "plugins: {disable: [acme]}",
    ]
    assert found.reason.startswith("install and turn on the same plugins")


def test_a_worker_that_is_locked_makes_other_plugins_fatal(kit):
    context, generation = kit.side("context", plugins=[FakeModelPlugin("A", name="acme")]), kit.side("generation")
    for pair in (
        (replace(context, locked=True), generation),
        (context, replace(generation, locked=True)),
    ):
        assert verdicts(pair)["plugins"].verdict is Verdict.FATAL
