import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.integrations.checkpoints import find_checkpoint

STORY = " ".join(f"On day {day} the boat took {day * 5 % 11} cars over the river." for day in range(1, 12))
SAYS_NOTHING_MORE = "<|im_start|>user\nSay OK.<|im_end|>\n<|im_start|>assistant\nOK."


def aggregated(worker, **body):
    answer = worker.complete(**body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def choice(answer):
    return answer["choices"][0]


def test_a_pair_answers_what_one_worker_alone_answers(pair):
    body = {"prompt": "The ferry leaves at", "max_tokens": 12}
    answer = pair.ask(**body)
    alone = aggregated(pair.context, **body)
    assert choice(answer)["token_ids"] == choice(alone)["token_ids"]
    assert choice(answer)["text"] == choice(alone)["text"]
    assert choice(answer)["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["kvferry"]["handoff"]["bytes"] == answer["usage"]["prompt_tokens"] * pair.token_bytes
    assert answer["kvferry"]["handoff"]["blocks"] == 1


def test_a_context_answer_holds_the_first_token_and_what_to_pass_on(pair):
    answer = pair.context.complete(
        prompt="The first of all", disaggregated_params={"request_type": "context_only", "disagg_request_id": 77}
    ).json()
    params = choice(answer)["disaggregated_params"]
    assert choice(answer)["token_ids"] == params["first_gen_tokens"]
    assert choice(answer)["finish_reason"] == "length"
    assert params["request_type"] == "context_only"
    assert params["disagg_request_id"] == 77
    assert params["ctx_info_endpoint"].startswith("tcp://127.0.0.1:")
    assert answer["usage"]["completion_tokens"] == 1
    params["request_type"] = "generation_only"
    body = {"prompt": answer["prompt_token_ids"], "max_tokens": 4, "disaggregated_params": params}
    assert choice(pair.generation.complete(**body).json())["token_ids"][:1] == params["first_gen_tokens"]


def test_only_the_blocks_that_generation_lacks_travel(pair):
    first = pair.ask(prompt=f"{STORY} In the end", max_tokens=2)
    second = pair.ask(prompt=f"{STORY} Then came", max_tokens=2)
    cached = second["kvferry"]["handoff"]["cached_tokens"]
    assert first["kvferry"]["handoff"]["cached_tokens"] == 0
    assert cached >= pair.block_tokens * 4
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    assert second["kvferry"]["handoff"]["bytes"] == (second["usage"]["prompt_tokens"] - cached) * pair.token_bytes


def test_a_prompt_that_is_there_already_moves_no_byte_and_still_frees_the_context_worker(pair):
    tokens = list(range(1000, 1000 + 2 * pair.block_tokens))
    first, second = (pair.ask(prompt=tokens, max_tokens=3, ignore_eos=True) for _ in range(2))
    assert first["kvferry"]["handoff"]["bytes"] == len(tokens) * pair.token_bytes
    assert second["kvferry"]["handoff"]["bytes"] == 0
    assert choice(first)["token_ids"] == choice(second)["token_ids"]
    pair.context.require_settled(seconds=2)


def test_one_token_needs_no_decoding_but_its_hand_off_is_concluded(pair):
    answer = pair.ask(prompt="One token of", max_tokens=1)
    assert len(choice(answer)["token_ids"]) == 1
    assert choice(answer)["finish_reason"] == "length"
    pair.context.require_settled(seconds=2)


def test_an_output_that_ends_with_its_first_token_offers_no_hand_off(pair):
    answer = pair.context.complete(
        prompt=SAYS_NOTHING_MORE, disaggregated_params={"request_type": "context_only"}
    ).json()
    assert choice(answer)["finish_reason"] == "stop"
    assert choice(answer)["text"] == ""
    pair.context.require_settled(seconds=2)
    params = choice(answer)["disaggregated_params"]
    assert params["encoded_opaque_state"] is None
    params["request_type"] = "generation_only"
    body = {"prompt": answer["prompt_token_ids"], "max_tokens": 8, "disaggregated_params": params}
    generated = pair.generation.complete(**body)
    assert generated.status_code == 200, generated.text
    assert choice(generated.json())["token_ids"] == params["first_gen_tokens"]
    assert choice(generated.json())["finish_reason"] == "stop"


def test_ignoring_the_end_goes_on(pair):
    answer = pair.ask(prompt=SAYS_NOTHING_MORE, max_tokens=5, ignore_eos=True)
    assert len(choice(answer)["token_ids"]) == 5


@pytest.mark.parametrize("seed", [7, None])
def test_a_sampler_goes_on_where_it_was(pair, seed):
    body = {"prompt": "My favourite colour is", "max_tokens": 12, "temperature": 1.2, "top_p": 0.95}
    if seed is None:  # the context worker draws one, and it travels
        assert len(choice(pair.ask(**body))["token_ids"]) == 12
        return
    answers = [choice(pair.ask(**body, seed=seed))["token_ids"] for _ in range(2)]
    alone = choice(aggregated(pair.generation, **body, seed=seed))["token_ids"]
    other = choice(aggregated(pair.generation, **body, seed=seed + 1))["token_ids"]
    assert answers == [alone, alone]
    assert other != alone


def test_a_stream_says_the_same_as_a_whole_answer(pair):
    body = {"prompt": "Streams and rivers", "max_tokens": 10}
    whole = choice(aggregated(pair.generation, **body))
    events = pair.generation.stream(**pair.prefill(**body), stream_options={"include_usage": True})
    *pieces, usage = events
    assert "".join(choice(piece)["text"] for piece in pieces) == whole["text"]
    assert [token for piece in pieces for token in choice(piece)["token_ids"]] == whole["token_ids"]
    assert [choice(piece)["finish_reason"] for piece in pieces[:-1]] == [None] * 10
    assert choice(pieces[-1])["finish_reason"] == "length"
    assert pieces[-1]["kvferry"]["handoff"]["bytes"] == usage["usage"]["prompt_tokens"] * pair.token_bytes
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 10)


def test_a_router_that_streams_the_context_side_too_gets_the_parameters_in_the_last_event(pair):
    last = pair.context.stream(prompt="Stream me", disaggregated_params={"request_type": "context_only"})[-1]
    params = {**choice(last)["disaggregated_params"], "request_type": "generation_only"}
    answer = pair.generation.complete(prompt=last["prompt_token_ids"], max_tokens=2, disaggregated_params=params)
    assert answer.status_code == 200, answer.text


def test_a_stop_text_ends_the_output_before_it(pair):
    body = {"prompt": "Count: one, two, three,", "max_tokens": 12}
    text = choice(aggregated(pair.generation, **body))["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = pair.ask(**body, stop=[stop, "never said"])
    assert choice(answer)["text"] == text[: text.index(stop)]
    assert choice(answer)["finish_reason"] == "stop"
    streamed = pair.generation.stream(**pair.prefill(**body), stop=stop)
    assert "".join(choice(event)["text"] for event in streamed) == text[: text.index(stop)]


def test_eight_requests_at_a_time_get_their_own_answers(pair):
    prompts = [f"The number {number} bus goes to" for number in range(8)]
    expected = [choice(aggregated(pair.generation, prompt=prompt, max_tokens=6))["token_ids"] for prompt in prompts]
    barrier = threading.Barrier(len(prompts))

    def ask(prompt):
        barrier.wait()
        return choice(pair.ask(prompt=prompt, max_tokens=6))["token_ids"]

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask, prompts)) == expected


def test_prompts_come_as_openai_clients_write_them(pair):
    as_text = aggregated(pair.context, prompt="Hello there", max_tokens=2)
    for prompt in (["Hello there"], [19556, 665], [[19556, 665]]):
        answer = aggregated(pair.context, prompt=prompt, max_tokens=2, user="me", n=1, best_of=1, logit_bias=None)
        assert answer["usage"]["prompt_tokens"] == as_text["usage"]["prompt_tokens"]
        assert choice(answer)["token_ids"] == choice(as_text)["token_ids"]


def test_the_model_is_listed_and_answers_to_its_names(pair):
    (model,) = pair.context.http.get("/v1/models").json()["data"]
    assert model["id"] == "smollm2"
    for name in ("smollm2", "SmolLM2-135M-Instruct", str(find_checkpoint("smollm2"))):
        assert pair.context.complete(prompt="Hi", max_tokens=1, model=name).status_code == 200
