import pytest
import torch

from kvferry.checkpoint import load_model_spec, model_geometry
from kvferry.integrations.transformers.agreement import require_same_layers
from kvferry.integrations.transformers.engine import GenerationRequest, PagedEngine
from kvferry.integrations.transformers.paged_cache import PagedCache
from kvferry.integrations.transformers.sampling import SamplingParams
from kvferry.testing.tiny_checkpoints import TINY_MODELS, WINDOW
from kvferry_plugins.errors import CacheFullError, ConfigError

NEEDS_V2 = ("deepseek_v3", "kimi_linear", "lfm2", "qwen3_next")
WITH_STATES = ("kimi_linear", "lfm2", "qwen3_next")
WITH_WINDOWS = ("gemma3", "gpt_oss")
CELLS = [(name, kind) for name in TINY_MODELS for kind in ("V1", "V2") if kind == "V2" or name not in NEEDS_V2]
NEW_TOKENS = 24

pytestmark = pytest.mark.usefixtures("one_thread")


def prompt_of(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def request_for(number: int, prompt: tuple[int, ...], **kwargs) -> GenerationRequest:
    return GenerationRequest(number, prompt, NEW_TOKENS, ignore_stop=True, **kwargs)


def in_use(engine: PagedEngine) -> list[int]:
    return [engine.manager.statistics(group).in_use for group in range(len(engine.manager.layout.groups))]


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_greedy_decoding_equals_transformers_own_cache(tiny_model, make_engine, reference, name, kind, reuse):
    loaded = tiny_model(name)
    engine = make_engine(loaded, 2048, kind=kind, reuse=reuse, tokens_per_block=8, prefill_chunk=40)
    for number, length in enumerate([3, WINDOW + 1, 170]):
        prompt = prompt_of(length, seed=length)
        output = list(engine.decode(engine.prefill(request_for(number, prompt))))
        assert output == reference(loaded, prompt, NEW_TOKENS, ignore_stop=True)
        assert len(set(output)) > 5
    again = engine.prefill(request_for(9, prompt))
    assert again.cached_tokens == (168 if reuse and name not in WITH_STATES else 0)
    assert list(engine.decode(again)) == output
    assert not any(in_use(engine))


@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_a_prefill_in_chunks_writes_what_one_in_one_piece_writes(tiny_model, make_engine, name, kind):
    loaded = tiny_model(name)
    engines = [make_engine(loaded, 512, kind=kind, tokens_per_block=8, prefill_chunk=chunk) for chunk in (13, 512)]
    running = [engine.prefill(request_for(1, prompt_of(170))) for engine in engines]
    assert running[0].output_token_ids == running[1].output_token_ids
    for index, group in enumerate(engines[0].manager.layout.groups):
        tables = [engine.manager.block_table(1)[index] for engine in engines]
        assert (tables[0] >= 0).tolist() == (tables[1] >= 0).tolist()
        tokens = 170 - 169 // group.tokens_per_block * group.tokens_per_block
        for layer in group.layers:
            for role in engines[0].manager.role_views(layer):
                last = [
                    engine.manager.role_views(layer)[role][table[-1]][:, :tokens]
                    for engine, table in zip(engines, tables, strict=True)
                ]
                torch.testing.assert_close(*last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NEEDS_V2)
def test_v1_refuses_what_it_has_no_room_for_and_names_v2(tiny_model, make_manager, name):
    with pytest.raises(ConfigError, match="use_kv_cache_manager_v2: true") as raised:
        make_manager(tiny_model(name).geometry, 64, kind="V1")
    assert raised.value.setting == "kv_cache_config.use_kv_cache_manager_v2"


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_blocks_that_slid_out_go_back_while_prefill_and_decoding_go_on(tiny_model, make_engine, name):
    engine = make_engine(tiny_model(name), 2048, kind="V2", reuse=False, tokens_per_block=8, prefill_chunk=40)
    sliding = next(index for index, group in enumerate(engine.manager.layout.groups) if group.window == WINDOW)
    group = engine.manager.layout.groups[sliding]
    held: list[int] = []
    running = engine.prefill(request_for(1, prompt_of(170)), lambda computed: held.append(in_use(engine)[sliding]))
    while running.finish_reason is None:
        engine.decode_step(running)
        held.append(in_use(engine)[sliding])
        first = group.first_block_needed(running.computed_tokens)
        table = engine.manager.block_table(1)[sliding]
        assert (table[:first] == -1).all()
        assert (table[first:] >= 0).all()
    assert max(held) <= -(-WINDOW // group.tokens_per_block) + 1
    full = engine.manager.layout.groups[1 - sliding]
    assert in_use(engine)[1 - sliding] == full.blocks_for(running.computed_tokens)


@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_a_chunk_longer_than_a_windows_pool_is_computed_in_smaller_ones(tiny_model, make_engine, reference, name):
    loaded, prompt = tiny_model(name), prompt_of(1700)
    engine = make_engine(loaded, 1728, kind="V2", reuse=False, tokens_per_block=8, prefill_chunk=1728)
    steps: list[int] = []
    running = engine.prefill(request_for(1, prompt), steps.append)
    assert len(steps) > 1
    assert list(engine.decode(running)) == reference(loaded, prompt, NEW_TOKENS, ignore_stop=True)
    assert not any(in_use(engine))


def test_a_request_that_cannot_be_started_leaves_no_block_behind(tiny_model, make_engine, monkeypatch):
    engine = make_engine(tiny_model("llama"), 64, kind="V2", tokens_per_block=8)

    def broken(layer: int) -> None:
        raise RuntimeError("no view")

    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "role_views", broken)
        with pytest.raises(RuntimeError, match="no view"):
            engine.start(request_for(1, prompt_of(20)))
    assert not any(in_use(engine))
    assert engine.prefill(request_for(1, prompt_of(20))).prefilled


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])
def test_of_mla_one_latent_row_a_token_is_kept(tiny_model, make_engine, name):
    engine = make_engine(tiny_model(name), 512, kind="V2", tokens_per_block=8)
    layout = engine.manager.layout
    index = next(index for index, group in enumerate(layout.groups) if group.kind == "latent")
    assert layout.block_bytes(index) == 8 * len(layout.groups[index].layers) * (12 + 4) * 4
    assert {view.role for pool in layout.groups[index].pools for view in layout.pools[pool].views} == {"latent"}


def test_expanded_keys_and_values_are_refused_where_latents_are_kept(tiny_model, make_engine):
    engine = make_engine(tiny_model("deepseek_v3"), 64, kind="V2", tokens_per_block=8)
    engine.manager.allocate(1, 3)
    layer = PagedCache(engine.manager, 1, engine.loaded).layers[0]
    with pytest.raises(ConfigError, match=r"caches 4 heads of \(12, 6\) elements, not one latent row of 16"):
        layer.update(torch.zeros(1, 4, 3, 12), torch.zeros(1, 4, 3, 6))


def copy_request(source: PagedEngine, target: PagedEngine, request_id: int, tokens: int) -> int:
    """Do what a hand-off does, row by row through the layouts; the rows copied."""
    copied = 0
    layouts = source.manager.layout, target.manager.layout
    for layer in range(source.loaded.geometry.num_layers):
        groups = [layout.groups[layout.group_of(layer)] for layout in layouts]
        theirs, ours = (
            engine.manager.block_table(request_id)[engine.manager.layout.group_of(layer)].tolist()
            for engine in (source, target)
        )
        for role, view in target.manager.role_views(layer).items():
            other = source.manager.role_views(layer)[role]
            if groups[1].kind == "state":
                view[ours[0]] = other[theirs[0]]
                continue
            for token in range(tokens):
                (here, row), (there, their_row) = (divmod(token, group.tokens_per_block) for group in reversed(groups))
                if ours[here] >= 0:
                    assert theirs[there] >= 0
                    view[ours[here], :, row] = other[theirs[there], :, their_row]
                    copied += 1
    return copied


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "V2") for name in TINY_MODELS), ("gemma3", "V1"), ("gpt_oss", "V1")]
)
def test_a_request_that_moves_by_its_blocks_goes_on_as_it_would_have_here(tiny_model, make_engine, name, kind):
    loaded, prompt = tiny_model(name), prompt_of(101)
    request = request_for(1, prompt, sampling=SamplingParams(temperature=0.8, seed=3))
    context = make_engine(loaded, 512, kind=kind, tokens_per_block=16, prefill_chunk=24)
    generation = make_engine(loaded, 512, kind="V2", tokens_per_block=8)
    generation.manager.allocate(7, 20)
    prefilled = context.prefill(request)
    generation.manager.allocate(1, len(prompt), prompt, history_tokens=len(prompt))
    copied = copy_request(context, generation, 1, len(prompt))
    if name in WITH_WINDOWS:
        assert copied < 2 * 4 * len(prompt)
    adopted = generation.adopt(request, prefilled.output_token_ids[0])
    moved = list(generation.decode(adopted))
    assert moved == list(context.decode(prefilled))
    assert len(set(moved)) > 5


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_request_that_was_suspended_goes_on_with_other_blocks(tiny_model, make_engine, name):
    loaded, prompt = tiny_model(name), prompt_of(90)
    engine = make_engine(
        loaded, 512, kind="V2", tokens_per_block=8, prefill_chunk=40, reuse=False, host_cache_size=1 << 20
    )
    expected = list(engine.decode(engine.prefill(request_for(1, prompt))))
    running = engine.start(request_for(2, prompt))
    engine.prefill_step(running)
    move_elsewhere(engine, running)
    while not running.prefilled:
        engine.prefill_step(running)
    for _ in range(5):
        engine.decode_step(running)
    move_elsewhere(engine, running)
    assert list(engine.decode(running))[-1] == expected[-1]
    assert running.output_token_ids == expected


def move_elsewhere(engine: PagedEngine, running) -> None:
    request_id = running.request.request_id
    before = [table.tolist() for table in engine.manager.block_table(request_id)]
    engine.manager.suspend(request_id)
    intruder = 1000 + running.computed_tokens
    engine.manager.allocate(intruder, running.computed_tokens)
    engine.manager.extend(intruder, running.computed_tokens)
    for layer in range(engine.loaded.geometry.num_layers):
        group = engine.manager.layout.group_of(layer)
        for view in engine.manager.role_views(layer).values():
            view[engine.manager.block_table(intruder)[group].tolist()] = 99.0
    engine.manager.resume(request_id)
    assert [table.tolist() for table in engine.manager.block_table(request_id)] != before


def test_a_state_is_not_touched_by_a_step_that_finds_no_room(tiny_model, make_engine, reference):
    loaded, prompt = tiny_model("qwen3_next"), prompt_of(8)
    engine = make_engine(loaded, 32, kind="V2", tokens_per_block=8)
    running = engine.prefill(request_for(1, prompt))
    engine.manager.allocate(2, 24)
    with pytest.raises(CacheFullError):
        engine.decode_step(running)
    engine.manager.free(2)
    tokens = [running.output_token_ids[0], *(engine.decode_step(running) for _ in range(12))]
    assert tokens == reference(loaded, prompt, 13, ignore_stop=True)


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_a_window_narrower_than_what_attention_sees_is_refused_where_it_would_be_honoured(
    tiny_checkpoint, tiny_model, make_manager, name
):
    config = load_model_spec(tiny_checkpoint(name)).pretrained_config
    narrowed = model_geometry(config, "float32", max_attention_window=[16])
    with pytest.raises(ConfigError, match="a window of 16 tokens is configured for layer 0") as raised:
        PagedEngine(tiny_model(name), make_manager(narrowed, 512, kind="V2"))
    assert raised.value.setting == "kv_cache_config.max_attention_window"
    PagedEngine(tiny_model(name), make_manager(narrowed, 512, kind="V1"))
    wide = model_geometry(config, "float32", max_attention_window=[2048])
    PagedEngine(tiny_model(name), make_manager(wide, 512, kind="V2"))


def test_a_tiny_checkpoint_is_the_same_at_every_writing(tmp_path, tiny_checkpoint):
    from kvferry.integrations.model_identity import model_identity
    from kvferry.testing.tiny_checkpoints import write_tiny_checkpoint

    assert model_identity(write_tiny_checkpoint("qwen3_next", tmp_path)) == model_identity(
        tiny_checkpoint("qwen3_next")
    )


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("gemma3", {"layer_types": ["sliding_attention"] * 4}, "all tokens for layer 2"),
        ("gemma3", {"sliding_window": 16}, "a window of 24 for layer 0"),
        ("lfm2", {"layer_types": ["full_attention"] * 4}, "a state for layer 0"),
        ("llama", {"num_hidden_layers": 3}, "4 layers"),
    ],
    ids=["full", "wider", "state", "more"],
)
def test_a_model_that_is_not_what_its_config_was_understood_as_is_refused(
    tiny_checkpoint, tiny_model, name, fields, message
):
    folder = tiny_checkpoint(name)
    misread = model_geometry({**load_model_spec(folder).pretrained_config, **fields})
    with pytest.raises(ConfigError, match=f"transformers keeps {message}"):
        require_same_layers(tiny_model(name).model, misread, folder)
