import pytest

from kvferry.testing.worker_pair import worker_pair
from kvferry_plugins.errors import TransferError
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.testing.faults import FailPost
from kvferry_plugins.types import ModelGeometry

PROMPT = tuple(range(30))


def hand_over(pair, request_id=1):
    request = pair.prefill(request_id, PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    pair.generation.transceiver.request_and_receive_sync(pair.admit(request, request_id + 10))


def test_a_pair_hands_over_what_was_prefilled():
    with worker_pair() as pair:
        hand_over(pair)
        assert (pair.context.blocks(1) == pair.generation.blocks(11)).all()
        assert pair.context.blocks(1).any()


def test_the_seed_decides_what_is_prefilled():
    with worker_pair() as pair:
        for number, seed in ((1, 7), (2, 7), (3, 8)):
            pair.prefill(number, PROMPT, seed=seed)
        first, second, third = (pair.context.blocks(number) for number in (1, 2, 3))
        assert (first == second).all()
        assert (first != third).any()


@pytest.mark.parametrize("given", ["context_agent", "generation_agent"])
def test_one_agent_alone_may_be_given(given):
    with worker_pair(**{given: ScriptedAgent("given", hub=ScriptedHub())}) as pair:
        hand_over(pair)


def test_a_scripted_fault_is_an_error_of_the_request():
    with worker_pair(context_agent=ScriptedAgent(script=[FailPost()])) as pair:
        with pytest.raises(TransferError, match="the script refuses this post"):
            hand_over(pair)
        hand_over(pair, 2)


def test_two_pairs_do_not_meet():
    with worker_pair() as one, worker_pair() as other:
        for pair in (one, other):
            hand_over(pair)
        assert one.context.agent.hub is not other.context.agent.hub


def test_geometry_blocks_and_capacity_are_the_callers():
    geometry = ModelGeometry(3, 1, 4, "bfloat16", (None,) * 3)
    with worker_pair(geometry=geometry, tokens_per_block=8, max_tokens=80) as pair:
        layout = pair.generation.manager.layout
        assert layout.num_blocks(0) == 10
        assert layout.block_bytes(0) == 3 * 2 * 8 * 4 * 2
        hand_over(pair)


def test_everything_is_shut_down_even_when_the_body_raises():
    with pytest.raises(RuntimeError, match="the test"), worker_pair() as pair:
        raise RuntimeError("the test")
    for worker in (pair.context, pair.generation):
        assert worker.agent.closed
        assert not worker.transceiver.status_dump()["loop_alive"]


def test_a_configuration_that_cannot_be_leaves_nothing_behind():
    agent = ScriptedAgent("given", hub=ScriptedHub())
    with (
        pytest.raises(TypeError),
        worker_pair(generation_agent=agent, generation_config={"kv_transfer_timeout_ms": "x"}),
    ):
        pass
    assert agent.counters.registrations == 0
