import base64
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from kvferry.transceiver.params import pack_state, unpack_state

PARAMS = "disaggregated_params"


def error_of(answer):
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


def refused(answer, status, param):
    assert answer.status_code == status, answer.text
    error = error_of(answer)
    assert error["param"] == param, error
    assert error["message"]
    if status < 500:
        assert error["type"] == "invalid_request_error"
    return error


@pytest.fixture
def prefilled(pair):
    """A hand-off that waits to be fetched, and is fetched at the end if the test left it."""
    body = pair.prefill(prompt="A request of its own", max_tokens=2)
    yield body
    pair.generation.complete(**body)


def changed(body, **params):
    return {**body, PARAMS: {**body[PARAMS], **params}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**64}, "seed"),
        ({"n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["one", "two"]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [5] * 9000}, "prompt"),
        ({"max_tokens": 9000}, "max_tokens"),
        ({"maximum_tokens": 5}, "maximum_tokens"),
        ({PARAMS: {}}, f"{PARAMS}.request_type"),
        ({PARAMS: {"request_type": "both"}}, f"{PARAMS}.request_type"),
        ({PARAMS: {"request_type": "context_only"}}, f"{PARAMS}.request_type"),
        ({PARAMS: {"request_type": "context_and_generation", "ctx_id": 5}}, f"{PARAMS}.ctx_id"),
        ({PARAMS: 5}, PARAMS),
    ],
    ids=str,
)
def test_a_malformed_request_names_its_parameter(pair, wrong, param, stream):
    refused(pair.generation.complete(**{"prompt": "Hi", "stream": stream, **wrong}), 400, param)


def test_a_misspelt_parameter_names_the_right_one(pair):
    assert "max_tokens" in refused(pair.context.complete(prompt="Hi", max_token=5), 400, "max_token")["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 5000, b'{"prompt": "x", "temperature": NaN}'])
def test_a_body_that_is_no_request_is_a_400(pair, body):
    answer = pair.context.http.post("/v1/completions", content=body)
    assert answer.status_code == 400, answer.text
    error_of(answer)


def test_unknown_paths_methods_and_models_are_errors_in_openais_shape(pair):
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        answer = pair.context.http.request(method, path)
        assert answer.status_code == status
        error_of(answer)
    refused(pair.context.complete(prompt="Hi", model="gpt-17"), 404, "model")


def test_each_worker_takes_its_own_role_only(pair, prefilled):
    refused(pair.context.complete(**prefilled), 400, f"{PARAMS}.request_type")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"encoded_opaque_state": None}, "encoded_opaque_state"),
        ({"encoded_opaque_state": "no base64!"}, "encoded_opaque_state"),
        ({"encoded_opaque_state": base64.b64encode(b"garbage").decode()}, "encoded_opaque_state"),
        ({"encoded_opaque_state": 5}, "encoded_opaque_state"),
        ({"ctx_request_id": None}, "ctx_request_id"),
        ({"ctx_request_id": 123456}, "ctx_request_id"),
        ({"ctx_request_id": -1}, "ctx_request_id"),
        ({"ctx_info_endpoint": None}, "ctx_info_endpoint"),
        ({"ctx_info_endpoint": "http://127.0.0.1:80"}, "ctx_info_endpoint"),
        ({"ctx_info_endpoint": "tcp://192.0.2.1:5000"}, "ctx_info_endpoint"),
        ({"ctx_info_endpoint": "tcp://127.0.0.1:99999"}, "ctx_info_endpoint"),
        ({"first_gen_tokens": None}, "first_gen_tokens"),
        ({"first_gen_tokens": []}, "first_gen_tokens"),
        ({"first_gen_tokens": [1, 2]}, "first_gen_tokens"),
        ({"first_gen_tokens": [49152]}, "first_gen_tokens"),
        ({"draft_tokens": [1]}, "draft_tokens"),
        ({"schedule_style": "whenever"}, "schedule_style"),
    ],
    ids=str,
)
def test_malformed_hand_off_parameters_name_the_field_and_cost_nothing(pair, prefilled, wrong, param, stream):
    started = time.monotonic()
    refused(pair.generation.complete(**changed(prefilled, **wrong), stream=stream), 400, f"{PARAMS}.{param}")
    assert time.monotonic() - started < 2
    assert not pair.generation.unsettled
    answer = pair.generation.complete(**prefilled)
    assert answer.status_code == 200, answer.text


def test_another_prompt_is_refused(pair, prefilled):
    refused(pair.generation.complete(**{**prefilled, "prompt": "Another prompt"}), 400, "prompt")


def test_another_requests_parameters_are_refused(pair, prefilled):
    other = pair.prefill(prompt="Somebody else's request", max_tokens=2)
    refused(pair.generation.complete(**{**other, PARAMS: prefilled[PARAMS]}), 400, "prompt")
    mixed = changed(other, encoded_opaque_state=prefilled[PARAMS]["encoded_opaque_state"])
    refused(pair.generation.complete(**mixed), 400, f"{PARAMS}.ctx_request_id")
    assert pair.generation.complete(**other).status_code == 200


def tampered(body, **fields):
    state = unpack_state(base64.b64decode(body[PARAMS]["encoded_opaque_state"]))
    encoded = base64.b64encode(pack_state(msgspec.structs.replace(state, **fields))).decode()
    return changed(body, encoded_opaque_state=encoded)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", [{"token": bytes(16)}, {"incarnation": 5}, {"counter": 9}], ids=str)
def test_a_guessed_token_or_another_life_is_refused(pair, prefilled, fields, stream):
    answer = pair.generation.complete(**tampered(prefilled, **fields), stream=stream)
    refused(answer, 400, f"{PARAMS}.encoded_opaque_state")
    assert not pair.generation.unsettled


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_parameters_work_once(pair, prefilled, stream):
    assert pair.generation.complete(**prefilled).status_code == 200
    refused(pair.generation.complete(**prefilled, stream=stream), 410, f"{PARAMS}.ctx_request_id")


def test_of_several_that_fetch_with_the_same_parameters_one_gets_them(pair):
    tokens = [(number * 7907) % 40000 + 100 for number in range(400)]
    body = pair.prefill(prompt=tokens, max_tokens=2)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: pair.generation.complete(**body), range(4)))
    assert sorted(answer.status_code for answer in answers)[0] == 200
    for answer in answers:
        if answer.status_code != 200:
            refused(answer, answer.status_code, f"{PARAMS}.ctx_request_id")
            assert answer.status_code in (409, 410)
    assert sum(answer.status_code == 200 for answer in answers) == 1


def test_expired_parameters_are_refused_at_once(pair):
    body = pair.prefill(prompt="This one takes too long", max_tokens=2)
    pair.context.require_settled()
    started = time.monotonic()
    refused(pair.generation.complete(**body), 410, f"{PARAMS}.ctx_request_id")
    assert time.monotonic() - started < 2


def test_a_context_worker_that_is_not_there_is_a_502(pair, prefilled):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        answer = pair.generation.complete(**changed(prefilled, ctx_info_endpoint=endpoint))
    assert refused(answer, 502, None)["type"] == "server_error"
    assert answer.elapsed.total_seconds() < 8


def test_a_prompt_for_which_there_is_no_room_is_a_503_with_figures(pair):
    error = refused(pair.context.complete(prompt=[9] * 7000, max_tokens=1), 503, None)
    assert error["code"] == "cache_full"
    assert "needed 219 blocks" in error["message"]
    assert "of 192" in error["message"]
    assert pair.context.complete(prompt="Hi", max_tokens=1).status_code == 200
