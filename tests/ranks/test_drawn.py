"""Deployments drawn as the mapping's own tests draw them, in real processes."""

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks.worlds import PAIRINGS, Processes, Worker, opened
from transceiver.geometries import Deployment, Side, deployments

EXAMPLES = 3
"""Of each pairing; drawn alike in every run."""


def worker(deployment: Deployment, side: Side) -> Worker:
    """Managers keep what they must: V1 takes layers that are alike, V2 all."""
    geometry = deployment.geometry
    alike = not geometry.layers and not side.slides
    return Worker(side.topology, "V1" if alike else "V2", side.tokens_per_block)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", PAIRINGS, indirect=True, ids=str)
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(deployment=deployments(), seed=st.integers(0, 1 << 30))
def test_drawn_worlds_hand_over(processes: Processes, deployment: Deployment, seed: int) -> None:
    chance = random.Random(seed)
    prompt = tuple(chance.randrange(1000) for _ in range(chance.randint(5, 40)))
    chunks = sorted({*(chance.randint(1, len(prompt)) for _ in range(2)), len(prompt)})
    context, generation = (worker(deployment, side) for side in (deployment.source, deployment.destination))
    with opened(processes, context, generation, deployment.geometry) as world:
        world.prefill(1, chunks[:-1], prompt)
        world.receive(1, prompt)
        world.prefill(1, chunks[-1:], prompt)
        ends = world.ends()
        assert {end["outcome"] for end in ends} == {"completed"}, ends
        assert sum(rank.ask("wrong_bytes", request_id=1, seed=1) for rank in world.generation) == 0
        world.free(1)
        world.settle()
