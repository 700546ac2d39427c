import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

PROMPT = [(number * 7919) % 40000 + 100 for number in range(200)]
CHUNK = 32
BODY = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}
PARAMS = "disaggregated_params"
ANNOUNCED = {"request_type": "context_only", "schedule_style": "generation_first"}


def choice(answer):
    return answer["choices"][0]


@pytest.fixture
def in_the_background():
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def receiving(status):
    return status["transceiver"]["receives"]


@pytest.mark.parametrize("pipelined", [False, True], ids=["whole", "pipelined"])
def test_the_client_sees_the_same_as_context_first(local_pair, pipelined):
    pair = local_pair(enable_pipelined_transfer=pipelined, memory={"enable_block_reuse": False})
    alone = pair.generation.complete(**BODY).json()
    first, then = pair.ask(**BODY), pair.generation.complete(**pair.announce(**BODY)).json()
    assert choice(first)["token_ids"] == choice(then)["token_ids"] == choice(alone)["token_ids"]
    assert choice(first)["text"] == choice(then)["text"]
    assert first["usage"] == then["usage"]
    assert then["kvferry"]["handoff"]["bytes"] == first["kvferry"]["handoff"]["bytes"] == len(PROMPT) * pair.token_bytes
    events = pair.generation.stream(**pair.announce(**BODY))
    assert [token for event in events for token in choice(event)["token_ids"]] == choice(alone)["token_ids"]
    assert choice(events[-1])["finish_reason"] == "length"


def test_the_context_worker_answers_before_it_has_computed_and_its_answer_holds_no_token(local_pair):
    pair = local_pair()
    gate = pair.context.gate()
    answer = pair.context.complete(**BODY, disaggregated_params={**ANNOUNCED, "disagg_request_id": 7}).json()
    params = choice(answer)[PARAMS]
    assert (choice(answer)["token_ids"], choice(answer)["finish_reason"]) == ([], None)
    assert (params["first_gen_tokens"], params["schedule_style"]) == ([], "generation_first")
    assert (params["request_type"], params["disagg_request_id"]) == ("context_only", 7)
    assert answer["prompt_token_ids"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 0
    assert gate.passed == 0
    gate.let()
    params["request_type"] = "generation_only"
    assert pair.generation.complete(**BODY, disaggregated_params=params).status_code == 200


def test_a_stream_of_the_context_worker_begins_with_the_parameters_and_goes_on_with_the_first_token(local_pair):
    pair = local_pair()
    first, token, last = pair.context.stream(**BODY, disaggregated_params=ANNOUNCED)
    assert choice(first)["token_ids"] == choice(first)[PARAMS]["first_gen_tokens"] == []
    assert first["prompt_token_ids"] == PROMPT
    assert len(choice(token)["token_ids"]) == 1
    assert choice(last)["finish_reason"] == "length"
    body = {**BODY, PARAMS: {**choice(first)[PARAMS], "request_type": "generation_only"}}
    assert choice(pair.generation.complete(**body).json())["token_ids"][:1] == choice(token)["token_ids"]


def test_chunks_leave_while_later_ones_are_not_computed_yet(local_pair, in_the_background):
    pair = local_pair(enable_pipelined_transfer=True)
    gate = pair.context.gate()
    answer = in_the_background(pair.generation.complete, **pair.announce(**BODY))
    pair.generation.wait(receiving)
    arrived = 0
    for passed in (1, 2, 3):
        gate.let(1)
        arrived = passed * CHUNK * pair.token_bytes
        pair.generation.wait(lambda status: receiving(status)[0]["bytes_done"] >= arrived)  # noqa: B023
        assert (gate.passed, receiving(pair.generation.status())[0]["bytes_done"]) == (passed, arrived)
        assert not answer.done()
    gate.let()
    assert answer.result(60).status_code == 200


def test_without_pipelining_nothing_leaves_before_the_end(local_pair, in_the_background):
    pair = local_pair()
    gate = pair.context.gate()
    answer = in_the_background(pair.generation.complete, **pair.announce(**BODY))
    gate.let(3)
    pair.context.wait(lambda status: gate.passed == 3)
    pair.generation.wait(receiving)
    assert receiving(pair.generation.status())[0]["bytes_done"] == 0
    gate.let()
    assert answer.result(60).status_code == 200


def test_what_the_context_worker_has_cached_leaves_before_its_first_step(local_pair, in_the_background):
    pair = local_pair(enable_pipelined_transfer=True, generation_memory={"enable_block_reuse": False})
    pair.ask(**BODY)
    gate = pair.context.gate()
    longer = {**BODY, "prompt": [*PROMPT, *range(500, 600)]}
    answer = in_the_background(pair.generation.complete, **pair.announce(**longer))
    pair.generation.wait(
        lambda status: receiving(status) and receiving(status)[0]["bytes_done"] == 192 * pair.token_bytes
    )
    assert gate.passed == 0
    gate.let()
    assert answer.result(60).status_code == 200


def test_the_next_request_with_the_same_beginning_fetches_only_the_rest(local_pair):
    pair = local_pair(enable_pipelined_transfer=True)
    pair.generation.complete(**pair.announce(**BODY))
    longer = {**BODY, "prompt": [*PROMPT, *range(500, 600)]}
    handoff = pair.generation.complete(**pair.announce(**longer)).json()["kvferry"]["handoff"]
    assert (handoff["cached_tokens"], handoff["bytes"]) == (192, 108 * pair.token_bytes)


def test_context_first_and_pipelined_hands_over_when_it_is_asked(local_pair):
    pair = local_pair(enable_pipelined_transfer=True, memory={"enable_block_reuse": False})
    alone = pair.generation.complete(**BODY).json()
    answer = pair.ask(**BODY)
    assert choice(answer)["token_ids"] == choice(alone)["token_ids"]
    assert answer["kvferry"]["handoff"]["bytes"] == len(PROMPT) * pair.token_bytes


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("pipelined", [False, True], ids=["whole", "pipelined"])
@pytest.mark.parametrize("first", ["ask", "announce"])
def test_a_first_token_that_ends_the_output(local_pair, first, pipelined, ignore_eos):
    pair = local_pair(enable_pipelined_transfer=pipelined)
    (token,) = choice(pair.generation.complete(**{**BODY, "max_tokens": 1}).json())["token_ids"]
    for worker in (pair.context, pair.generation):
        loaded = copy.copy(worker.service.loaded)  # other tests have the same
        object.__setattr__(loaded, "stop_token_ids", frozenset({token}))
        worker.service.engine.loaded = loaded
    body = {**BODY, "ignore_eos": ignore_eos}
    passed_on = pair.announce(**body) if first == "announce" else pair.prefill(**body)
    answer = choice(pair.generation.complete(**passed_on).json())
    assert answer["token_ids"][0] == token
    assert (len(answer["token_ids"]), answer["finish_reason"]) == ((6, "length") if ignore_eos else (1, "stop"))


@pytest.mark.parametrize("seed", [3, None])
def test_a_sampler_goes_on_where_it_was(local_pair, seed):
    pair = local_pair(enable_pipelined_transfer=True)
    body = {**BODY, "temperature": 1.5, **({"seed": seed} if seed else {})}
    tokens = choice(pair.generation.complete(**pair.announce(**body)).json())["token_ids"]
    assert len(tokens) == 6
    if seed:
        assert tokens == choice(pair.generation.complete(**body).json())["token_ids"]


# --- ends before the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipelined", [False, True], ids=["whole", "pipelined"])
@pytest.mark.parametrize("asked", ["before it", "after it"])
def test_a_prefill_that_fails_ends_the_generation_request_with_its_cause(
    local_pair, in_the_background, pipelined, asked
):
    pair = local_pair(enable_pipelined_transfer=pipelined)
    gate = pair.context.gate()
    body = pair.announce(**BODY)
    gate.let(2)
    if asked == "before it":
        answer = in_the_background(pair.generation.complete, **body)
        pair.context.wait(lambda status: gate.passed == 2)
        pair.generation.wait(receiving)
        gate.break_with(ValueError("the model burnt down"))
        answer = answer.result(60)
    else:
        pair.context.wait(lambda status: gate.passed == 2)
        gate.break_with(ValueError("the model burnt down"))
        pair.context.require_settled()
        answer = pair.generation.complete(**body)
    error = answer.json()["error"]
    assert answer.status_code == 410, answer.text
    assert "the model burnt down" in error["message"]
    assert error["param"] == f"{PARAMS}.ctx_request_id"


@pytest.mark.parametrize("pipelined", [False, True], ids=["whole", "pipelined"])
def test_a_router_that_hangs_up_at_the_context_worker_ends_both(local_pair, in_the_background, pipelined):
    pair = local_pair(enable_pipelined_transfer=pipelined)
    gate = pair.context.gate()
    asked = {**BODY, PARAMS: ANNOUNCED, "stream": True}
    with pair.context.http.stream("POST", "/v1/completions", json=asked) as events:
        lines = events.iter_lines()
        params = choice(json.loads(next(lines).removeprefix("data: ")))[PARAMS]
        body = {**BODY, PARAMS: {**params, "request_type": "generation_only"}}
        answer = in_the_background(pair.generation.complete, **body)
        gate.let(2)
        pair.context.wait(lambda status: gate.passed == 2)
        pair.generation.wait(receiving)
    loop = pair.context.service.loop
    pair.context.wait(lambda status: loop._inbox or loop.idle)  # until the server has noticed
    gate.let(1)  # the step that was under way
    answer = answer.result(60)
    assert answer.status_code == 410, answer.text
    assert "its prefill was cancelled" in answer.json()["error"]["message"]
    assert gate.passed <= 3


@pytest.mark.parametrize("pipelined", [False, True], ids=["whole", "pipelined"])
def test_a_client_that_hangs_up_at_the_generation_worker_stops_the_prefill(local_pair, pipelined):
    pair = local_pair(enable_pipelined_transfer=pipelined)
    gate = pair.context.gate()
    body = pair.announce(**BODY)
    threading.Timer(0.0, gate.let, [2]).start()
    with pytest.raises(Exception, match="timed out"):
        pair.generation.http.post("/v1/completions", json=body, timeout=1)
    pair.generation.wait(lambda status: not receiving(status))
    pair.context.wait(lambda status: gate.passed == 2 and not status["transceiver"]["sends"])
    gate.let(1)  # the step that was under way
    pair.context.require_settled()
    assert gate.passed <= 3


def test_a_prefill_that_nobody_asks_for_gives_its_blocks_back_when_its_lease_ends(local_pair):
    pair = local_pair(lease=300, enable_pipelined_transfer=True)
    body = pair.announce(**BODY)
    pair.context.require_settled()
    assert pair.generation.complete(**body).status_code == 410


def test_a_hand_off_that_waits_too_long_for_its_prefill_says_so(local_pair):
    pair = local_pair(lease=300)
    gate = pair.context.gate()
    answer = pair.generation.complete(**pair.announce(**BODY))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "handoff_timeout")
    assert "is the prefill done?" in answer.json()["error"]["message"]
    gate.let()


def test_no_room_at_the_context_worker_is_said_at_once(local_pair):
    pair = local_pair()
    answer = pair.context.complete(prompt=[5] * 2100, max_tokens=1, disaggregated_params=ANNOUNCED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "cache_full")


def test_another_first_token_than_the_one_that_travelled_is_refused(local_pair):
    pair = local_pair()
    body = pair.announce(**BODY)
    (token,) = choice(pair.generation.complete(**{**BODY, "max_tokens": 1}).json())["token_ids"]
    body[PARAMS]["first_gen_tokens"] = [token + 1]
    answer = pair.generation.complete(**body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"{PARAMS}.first_gen_tokens"


def test_several_at_a_time_get_their_own_answers(local_pair, in_the_background):
    pair = local_pair(enable_pipelined_transfer=True)
    bodies = [{**BODY, "prompt": [number + 11, *PROMPT]} for number in range(6)]
    alone = [choice(pair.generation.complete(**body).json())["token_ids"] for body in bodies]

    def ask(body):
        return choice(pair.generation.complete(**pair.announce(**body)).json())["token_ids"]

    assert [answer.result(60) for answer in [in_the_background(ask, body) for body in bodies]] == alone
