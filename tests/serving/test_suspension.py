"""When the device has no block left, the youngest request makes room for an older one, and goes on later."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry_plugins.errors import CacheFullError

TIERS = {"use_kv_cache_manager_v2": True, "host_cache_size": 1 << 24}
ROOM = {"max_tokens": 128, "enable_block_reuse": False}
"""Eight blocks of 16 tokens."""
BODIES = [{"prompt": [number + 11] * 17, "max_tokens": 60, "ignore_eos": True} for number in range(4)]
"""Each needs five blocks in the end."""


def tokens_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def at_a_time(function, bodies):
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(function, bodies))


def test_requests_that_do_not_fit_together_are_all_answered(local_pair, caplog):
    caplog.set_level("INFO", "kvferry.serving")
    pair = local_pair(memory={**ROOM, **TIERS})
    worker = pair.generation
    alone = [tokens_of(worker.complete(**body)) for body in BODIES]
    assert at_a_time(lambda body: tokens_of(worker.complete(**body)), BODIES) == alone
    assert any("is suspended" in record.message for record in caplog.records)


@pytest.mark.parametrize("pipelined", [False, True], ids=["whole", "pipelined"])
def test_received_requests_are_suspended_too(local_pair, caplog, pipelined):
    caplog.set_level("INFO", "kvferry.serving")
    pair = local_pair(
        memory={**TIERS, "enable_block_reuse": False}, generation_memory=ROOM, enable_pipelined_transfer=pipelined
    )
    alone = [tokens_of(pair.context.complete(**body)) for body in BODIES]
    announced = [pair.announce(**body) for body in BODIES]
    assert at_a_time(lambda body: tokens_of(pair.generation.complete(**body)), announced) == alone
    assert any("is suspended" in record.message for record in caplog.records)


def test_a_client_of_a_suspended_request_may_hang_up(local_pair):
    worker = local_pair(memory={**ROOM, **TIERS}).generation
    gate, hang_up = worker.gate(), threading.Event()

    def never_resume(request_id):
        raise CacheFullError("no room yet", needed=1, free=0, total=8)

    def listen(body):
        with worker.http.stream("POST", "/v1/completions", json={**body, "stream": True}):
            assert hang_up.wait(60)

    worker.service.engine.resume = never_resume
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(worker.complete, **{**BODIES[0], "max_tokens": 100})
        worker.wait(lambda status: status["manager"]["groups"][0]["in_use"] > 0)
        second = pool.submit(listen, BODIES[1])
        worker.wait(lambda status: len(worker.service.loop._live) == 2)
        gate.let()
        worker.wait(lambda status: status["engine"]["suspended"] == 1)
        hang_up.set()
        second.result(60)
        assert len(tokens_of(first.result(60))) == 100
    worker.require_settled()


def test_a_request_that_never_fits_fails_alone(local_pair):
    worker = local_pair(memory={**ROOM, **TIERS}).generation
    never = {**BODIES[0], "max_tokens": 200}
    answers = at_a_time(lambda body: worker.complete(**body), [never, *BODIES[1:]])
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "cache_full"
    for body, answer in zip(BODIES[1:], answers[1:], strict=True):
        assert tokens_of(answer) == tokens_of(worker.complete(**body))


@pytest.mark.parametrize("memory", [{}, {"use_kv_cache_manager_v2": True}], ids=["V1", "V2 without tiers"])
def test_without_tiers_whoever_needs_the_block_fails(local_pair, memory):
    worker = local_pair(memory={**ROOM, **memory}).generation
    statuses = [answer.status_code for answer in at_a_time(lambda body: worker.complete(**body), BODIES)]
    assert set(statuses) <= {200, 503}
    worker.require_settled()
    assert worker.complete(**BODIES[0]).status_code == 200


def test_tiers_without_room_are_as_none(local_pair):
    worker = local_pair(memory={**ROOM, **TIERS, "host_cache_size": 4096}).generation
    statuses = [answer.status_code for answer in at_a_time(lambda body: worker.complete(**body), BODIES)]
    assert set(statuses) <= {200, 503}
    worker.require_settled()


def test_a_suspended_request_whose_blocks_come_back_damaged_fails_alone(local_pair, tmp_path):
    pair = local_pair(
        memory={**ROOM, "use_kv_cache_manager_v2": True, "disk_cache_size": 1 << 24, "disk_cache_path": str(tmp_path)}
    )
    engine, resume = pair.generation.service.engine, pair.generation.service.engine.resume

    def damaged(request_id):
        for file in tmp_path.rglob("*"):
            if file.is_file():
                with file.open("r+b") as stream:
                    stream.truncate(8)
        resume(request_id)

    engine.resume = damaged
    answers = at_a_time(lambda body: pair.generation.complete(**body), BODIES)
    statuses = [answer.status_code for answer in answers]
    assert 200 in statuses
    assert set(statuses) <= {200, 500}
    pair.generation.require_settled()
