"""Many requests at once over one channel, with faults and cancellations in between."""

import random
from collections import Counter

import pytest

from kvferry.transceiver import pieces
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.testing.faults import Delay, Duplicate, FailAfter, FailPost

REQUESTS = 200


def faults(rng, count):
    kinds = [FailPost, lambda: FailAfter(rng.randint(0, 1)), Duplicate]
    kinds += [lambda: Delay(polls=rng.randint(1, 30), written=rng.randint(0, 1)) for _ in range(2)]
    return [rng.choice(kinds)() if rng.random() < 0.2 else None for _ in range(count)]


@pytest.mark.parametrize("seed", [1, 2])
def test_each_request_ends_once_on_each_side_and_what_completed_is_right(run_pair, kit, monkeypatch, seed):
    monkeypatch.setattr(pieces.cut, "__defaults__", (2048,))
    rng = random.Random(seed)
    hub = ScriptedHub()
    pair = run_pair(
        context_agent=ScriptedAgent("context", faults(rng, 3000), hub=hub),
        generation_agent=ScriptedAgent("generation", hub=hub, target_must_poll=True),
        config={"kv_transfer_timeout_ms": 20_000, "kv_transfer_admission_timeout_ms": 20_000},
        max_tokens=REQUESTS * 64,
    )
    context, generation = pair.context.transceiver, pair.generation.transceiver
    ends: tuple[dict, dict] = ({}, {})

    def collect(at_least=0):
        for found, status in zip(
            ends,
            (context.check_context_transfer_status(at_least), generation.check_gen_transfer_status(at_least)),
            strict=True,
        ):
            for event in status.events:
                assert event.request_id not in found
                found[event.request_id] = event

    sent, received = {}, {}
    for number in range(REQUESTS):
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 40)))
        sent[number] = pair.prefill(number, prompt)
        late = rng.random() < 0.3
        if not late:
            context.respond_and_send_async(sent[number])
        received[number] = pair.admit(sent[number], number + 1000)
        generation.request_and_receive_async(received[number])
        if late:
            context.respond_and_send_async(sent[number])
        if rng.random() < 0.15:
            context.cancel_request(sent[rng.randrange(number + 1)])
        if rng.random() < 0.15:
            generation.cancel_request(received[rng.randrange(number + 1)])
        collect()
    for number in range(REQUESTS):  # who was cancelled before the context worker heard of it waits there
        if number + 1000 in ends[1] and number not in ends[0]:
            context.cancel_request(sent[number])
    kit.wait_until(lambda: collect() or len(ends[1]) == REQUESTS, 20)
    for number in set(range(REQUESTS)) - set(ends[0]):
        context.cancel_request(sent[number])
    kit.wait_until(lambda: collect() or len(ends[0]) == REQUESTS, 20)
    kit.wait_until(lambda: context.drained and generation.drained, 10)
    outcomes = Counter(event.outcome for event in ends[1].values())
    assert set(outcomes) == {"completed", "failed", "cancelled"}
    for number in range(REQUESTS):
        if ends[1][number + 1000].outcome == "completed":
            assert (pair.context.blocks(number) == pair.generation.blocks(number + 1000)).all()
