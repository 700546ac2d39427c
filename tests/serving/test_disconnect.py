import time

import httpx
import pytest

LONG = {"max_tokens": 2000, "ignore_eos": True}


def hang_up(worker, body, *, after):
    """Send a request and close the connection ``after`` so many seconds, or with the first event of a stream."""
    timeout = httpx.Timeout(30, read=after if after is not None else 30)
    with httpx.Client(base_url=worker.process.http, timeout=timeout, trust_env=False) as http:
        if after is None:
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                assert next(answer.iter_lines()).startswith("data: ")
            return
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body)


@pytest.mark.parametrize("after", [1.0, None], ids=["whole", "streamed"])
def test_a_client_that_hangs_up_ends_its_decoding(pair, after):
    body = pair.prefill(prompt="Go on and on", **LONG)
    hang_up(pair.generation, body, after=after)
    pair.generation.require_settled(seconds=3)
    pair.context.require_settled(seconds=3)


def test_a_client_that_hangs_up_during_the_prefill_ends_it(pair):
    prompt = [(number * 7919) % 40000 + 100 for number in range(4000)]
    hang_up(pair.context, {"prompt": prompt, "disaggregated_params": {"request_type": "context_only"}}, after=0.5)
    pair.context.require_settled(seconds=60)  # the chunk under way still ends


def test_a_client_that_hangs_up_during_the_hand_off_ends_it_on_both_sides(pair, stopped):
    body = pair.prefill(prompt="Nobody will wait for this", **LONG)
    with stopped(pair.context.process.pid):
        hang_up(pair.generation, body, after=0.5)
        deadline = time.monotonic() + 3
        while pair.generation.status()["engine"]["transferring"] and time.monotonic() < deadline:
            time.sleep(0.02)
        assert pair.generation.status()["engine"]["transferring"] == 0
    pair.generation.require_settled(seconds=6)
    pair.context.require_settled(seconds=6)
    answer = pair.generation.complete(**body)
    assert answer.status_code == 410, answer.text
