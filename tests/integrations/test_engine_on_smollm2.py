import threading
import weakref

import pytest
import torch
from transformers import DynamicCache

from kvferry.integrations.transformers.engine import GenerationRequest, PagedEngine
from kvferry.integrations.transformers.paged_cache import PagedCache
from kvferry.integrations.transformers.sampling import SamplingParams
from kvferry.integrations.transformers.token_layers import PagedLayer
from kvferry_plugins.errors import CacheFullError, ConfigError
from kvferry_plugins.types import ModelGeometry

NEW_TOKENS = 24
STORY = " ".join(f"On day {day} the ferry took {day * 7 % 13} cars across the river." for day in range(1, 400))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def encode(smollm2):
    return lambda text: tuple(smollm2.tokenizer(text).input_ids)


@pytest.fixture(scope="module")
def long_prompt(encode):
    tokens = encode(STORY)[:2100]
    assert len(tokens) == 2100
    return tokens


def decode_all(engine: PagedEngine, request: GenerationRequest) -> list[int]:
    return list(engine.decode(engine.prefill(request)))


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is",
        "def fibonacci(n):",
        "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n",
    ],
    ids=["fact", "code", "chat"],
)
def test_greedy_decoding_equals_transformers_own_cache(smollm2, make_engine, reference, encode, text):
    prompt = encode(text)
    engine = make_engine(smollm2)
    assert decode_all(engine, GenerationRequest(1, prompt, NEW_TOKENS)) == reference(smollm2, prompt, NEW_TOKENS)
    assert engine.manager.statistics().in_use == 0


def test_a_long_prompt_and_one_that_shares_its_prefix_equal_transformers_own_cache(
    smollm2, make_engine, reference, encode, long_prompt
):
    engine = make_engine(smollm2)
    chunks: list[int] = []
    running = engine.prefill(GenerationRequest(1, long_prompt, NEW_TOKENS), chunks.append)
    assert chunks == [512, 1024, 1536, 2048, 2100]
    assert list(engine.decode(running)) == reference(smollm2, long_prompt, NEW_TOKENS)

    branch = (*long_prompt[:2000], *encode(" In short, the ferry"))
    running = engine.prefill(GenerationRequest(2, branch, NEW_TOKENS))
    assert running.cached_tokens == 2000 // 32 * 32 == 1984
    cache = DynamicCache(config=smollm2.model.config)
    with torch.inference_mode():
        for start in range(0, 2100, 512):
            smollm2.model(torch.tensor([long_prompt[start : start + 512]]), cache=cache)
    cache.crop(1984 - 2100)
    assert list(engine.decode(running)) == reference(smollm2, branch, NEW_TOKENS, cache=cache)


def test_prefill_writes_the_same_bytes_into_blocks_as_transformers_keeps(smollm2, make_engine, long_prompt):
    prompt = long_prompt[:700]
    engine = make_engine(smollm2)
    engine.prefill(GenerationRequest(1, prompt, 1))
    cache = DynamicCache(config=smollm2.model.config)
    with torch.inference_mode():
        for start in (0, 512):
            smollm2.model(torch.tensor([prompt[start : start + 512][: 700 - start]]), cache=cache)
    (table,) = engine.manager.block_table(1)
    for layer in (0, 14, 29):
        for view, expected in zip(
            engine.manager.layer_views(layer), (cache.layers[layer].keys, cache.layers[layer].values), strict=True
        ):
            ours = torch.cat([view[block] for block in table.tolist()], dim=1)[:, :700]
            assert torch.equal(ours, expected[0])


def test_transformers_generate_itself_runs_on_our_blocks(smollm2, make_manager, reference, encode):
    prompt = encode("The ferry leaves at")
    manager = make_manager(smollm2.geometry)
    manager.allocate(5, len(prompt))
    cache = PagedCache(manager, 5, smollm2)
    assert reference(smollm2, prompt, 40, cache=cache) == reference(smollm2, prompt, 40)
    assert cache.computed_tokens == len(prompt) + 39
    assert len(manager.block_table(5)[0]) == 2


def test_blocks_scattered_over_the_pool_decode_alike(smollm2, make_engine, reference, encode):
    engine = make_engine(smollm2, max_tokens=10 * 32)
    for filler in range(10):
        engine.manager.allocate(100 + filler, 1)
    for filler in (8, 1, 6, 3):
        engine.manager.free(100 + filler)
    prompt = encode(STORY)[:90]
    running = engine.prefill(GenerationRequest(1, prompt, 10, ignore_stop=True))
    assert engine.manager.block_table(1)[0].tolist() == [1, 3, 6]
    assert list(engine.decode(running)) == reference(smollm2, prompt, 10, ignore_stop=True)


def test_interleaved_requests_do_not_disturb_each_other(smollm2, make_engine, reference, encode):
    prompts = [encode("The capital of Spain is"), encode("Water boils at"), encode("One, two, three,")]
    engine = make_engine(smollm2)
    running = [engine.prefill(GenerationRequest(number, prompt, 8)) for number, prompt in enumerate(prompts)]
    while any(request.finish_reason is None for request in running):
        for request in running:
            if request.finish_reason is None:
                engine.decode_step(request)
    for request, prompt in zip(running, prompts, strict=True):
        engine.finish(request)
        assert request.output_token_ids == reference(smollm2, prompt, 8)


def test_requests_in_threads_do_not_disturb_each_other(smollm2, make_engine, reference, encode):
    prompts = [encode("The capital of Spain is"), encode("Water boils at")]
    engine = make_engine(smollm2)
    outputs: dict[int, list[int]] = {}

    def serve(number: int) -> None:
        outputs[number] = decode_all(engine, GenerationRequest(number, prompts[number], 8))

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outputs[number] for number in range(2)] == [reference(smollm2, prompt, 8) for prompt in prompts]


def test_a_request_that_moves_with_its_blocks_goes_on_as_it_would_have_here(smollm2, make_engine, encode):
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=1234)
    request = GenerationRequest(1, encode(STORY)[:70], NEW_TOKENS, sampling)
    here = decode_all(make_engine(smollm2), request)
    context, generation = make_engine(smollm2), make_engine(smollm2)
    prefilled = context.prefill(request)
    generation.manager.allocate(9, 3)
    moved = GenerationRequest(2, *_fields(request))
    generation.manager.allocate(2, len(moved.prompt_token_ids))
    for layer in range(smollm2.geometry.num_layers):
        for source, target in zip(
            context.manager.layer_views(layer), generation.manager.layer_views(layer), strict=True
        ):
            target[generation.manager.block_table(2)[0].tolist()] = source[context.manager.block_table(1)[0].tolist()]
    adopted = generation.adopt(moved, prefilled.output_token_ids[0])
    assert list(generation.decode(adopted)) == here
    assert here == decode_all(make_engine(smollm2), request)
    assert here != decode_all(make_engine(smollm2), GenerationRequest(1, request.prompt_token_ids, NEW_TOKENS))


def _fields(request: GenerationRequest) -> tuple[tuple[int, ...], int, SamplingParams]:
    return request.prompt_token_ids, request.max_tokens, request.sampling


def test_output_is_committed_for_the_next_turn(smollm2, make_engine, encode):
    engine = make_engine(smollm2)
    prompt = encode("Count: 1 2 3")
    output = decode_all(engine, GenerationRequest(1, prompt, 60, ignore_stop=True))
    assert len(output) == 60
    following = engine.prefill(GenerationRequest(2, (*prompt, *output, *prompt), 1))
    assert following.cached_tokens == (len(prompt) + 59) // 32 * 32


def test_a_stop_token_ends_the_output_and_is_its_last_token(smollm2, make_engine, reference, encode):
    prompt = encode("<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n")
    running = (engine := make_engine(smollm2)).prefill(GenerationRequest(1, prompt, 200))
    output = list(engine.decode(running))
    assert output == reference(smollm2, prompt, 200)
    assert (running.finish_reason, output[-1]) == ("stop", 2)
    assert len(output) < 200


def test_one_token_is_prefill_alone(smollm2, make_engine, reference, encode):
    prompt = encode("The capital of France is")
    engine = make_engine(smollm2)
    running = engine.prefill(GenerationRequest(1, prompt, 1))
    assert running.finish_reason == "length"
    assert list(engine.decode(running)) == reference(smollm2, prompt, 1)


def test_running_out_while_decoding_surfaces_and_frees_the_request(smollm2, make_engine, encode):
    engine = make_engine(smollm2, max_tokens=64)
    running = engine.prefill(GenerationRequest(1, encode(STORY)[:60], 100, ignore_stop=True))
    tokens = []
    with pytest.raises(CacheFullError, match="1 blocks of 32 tokens are needed, 0 of 2"):
        tokens.extend(engine.decode(running))
    assert engine.manager.statistics().in_use == 0


def test_a_step_without_room_can_be_tried_again(smollm2, make_engine, reference, encode):
    prompt = encode(STORY)[:32]
    engine = make_engine(smollm2, max_tokens=64)
    running = engine.prefill(GenerationRequest(1, prompt, 4, ignore_stop=True))
    engine.manager.allocate(7, 32)
    with pytest.raises(CacheFullError):
        engine.decode_step(running)
    assert running.computed_tokens == 32
    engine.manager.free(7)
    assert list(engine.decode(running)) == reference(smollm2, prompt, 4, ignore_stop=True)


def test_a_prompt_without_room_changes_nothing(smollm2, make_engine, encode):
    engine = make_engine(smollm2, max_tokens=64)
    with pytest.raises(CacheFullError):
        engine.prefill(GenerationRequest(1, encode(STORY)[:65], 1))
    assert engine.manager.statistics().free == 2


def test_a_failing_listener_frees_the_request(smollm2, make_engine, encode):
    engine = make_engine(smollm2)

    def fail(computed: int) -> None:
        raise OSError("the wire is cut")

    with pytest.raises(OSError, match="the wire is cut"):
        engine.prefill(GenerationRequest(1, encode("Hello"), 4), fail)
    assert engine.manager.statistics().in_use == 0


def test_closing_the_output_frees_the_request(smollm2, make_engine, encode):
    engine = make_engine(smollm2)
    output = engine.decode(engine.prefill(GenerationRequest(1, encode("Hello"), 50)))
    next(output)
    output.close()
    assert engine.manager.statistics().in_use == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 1, "no token"),
        ((1,), 0, "max_tokens must be at least 1"),
        ((1, 49152), 1, "outside 0 … 49151"),
        ((1, -1), 1, "outside 0 … 49151"),
        ((1,) * 8000, 193, "exceed the model's 8192 positions"),
    ],
    ids=["empty", "nothing wanted", "too high", "negative", "too long"],
)
def test_a_request_that_the_model_cannot_run_is_refused(smollm2, make_engine, prompt, max_tokens, message):
    engine = make_engine(smollm2, max_tokens=64)
    with pytest.raises(ValueError, match=message):
        engine.prefill(GenerationRequest(1, prompt, max_tokens))
    with pytest.raises(ValueError, match=message):
        engine.adopt(GenerationRequest(1, prompt, max_tokens), 1)


def test_a_first_token_outside_the_vocabulary_is_refused(smollm2, make_engine):
    with pytest.raises(ValueError, match="first token 49152"):
        make_engine(smollm2, max_tokens=64).adopt(GenerationRequest(1, (1, 2), 4), 49152)


def test_a_manager_of_another_shape_is_refused(smollm2, make_manager):
    other = make_manager(ModelGeometry(30, 9, 64, "float32", (None,) * 30), max_tokens=64)
    with pytest.raises(ConfigError, match=r"keeps \[\('key', 9, 256\), .* but the model has \[\('key', 3, 256\)"):
        PagedEngine(smollm2, other)


def test_no_second_copy_of_the_kv_outlives_a_layer(smollm2, make_engine, long_prompt, monkeypatch):
    gathered: list[weakref.ref[torch.Tensor]] = []
    original = PagedLayer.update

    def update(*args, **kwargs):
        assert not any(reference() is not None for reference in gathered), "the last layer's copy is still there"
        result = original(*args, **kwargs)
        gathered.extend(weakref.ref(tensor) for tensor in result)
        return result

    monkeypatch.setattr(PagedLayer, "update", update)
    engine = make_engine(smollm2)
    running = engine.prefill(GenerationRequest(1, long_prompt[:600], 4))
    engine.decode_step(running)
    assert len(gathered) == 3 * 30 * 2
    assert all(reference() is None for reference in gathered)
