"""Real processes and agents: what arrives on every generation rank, from every kind of world."""

import pytest
from ranks.worlds import PAIRINGS, PROMPT, Pairing, Processes, Worker, opened

from kvferry_plugins.types import LayerShape, ModelGeometry, RoleShape, Topology

NIXL, UCX, CPP_NIXL = PAIRINGS


def geometry(layers: int, heads: int, *shapes: LayerShape, windows: tuple[int | None, ...] | None = None):
    return ModelGeometry(layers, heads, 4, "float16", windows or (None,) * layers, shapes)


FULL = geometry(4, 4)
GROUPED = geometry(4, 2)
WINDOWS = geometry(4, 2, windows=(8, None, 8, 8))
LATENT = geometry(4, 1, *[LayerShape((RoleShape("latent", 1, 6),), "latent")] * 4)
ATTENTION = LayerShape((RoleShape("key", 2, 4), RoleShape("value", 2, 4)))
HYBRID = geometry(3, 2, ATTENTION, LayerShape((RoleShape("conv", 4, 3), RoleShape("ssm", 2, 8)), "state"), ATTENTION)


def v1(tensor: int, pipeline: int = 1, tokens_per_block: int = 4) -> Worker:
    return Worker(Topology(tensor, pipeline), "V1", tokens_per_block)


def v2(tensor: int, pipeline: int = 1, tokens_per_block: int = 4) -> Worker:
    return Worker(Topology(tensor, pipeline), "V2", tokens_per_block)


CASES = {
    "1 to 2": (NIXL, v1(1), v1(2), FULL),
    "2x2 to 4": (NIXL, v1(2, 2), v1(4), FULL),
    "MLA, 4 to 2x2": (NIXL, v2(4), v2(2, 2), LATENT),
    "windows, 2 to 1x2": (NIXL, v2(2), v2(1, 2), WINDOWS),
    "4 to 1, larger blocks to smaller": (UCX, v1(4, tokens_per_block=8), v1(1), FULL),
    "GQA, 4 to 2": (UCX, v1(4), v1(2), GROUPED),
    "GQA, 2 to 4, smaller blocks to larger": (UCX, v1(2), v1(4, tokens_per_block=8), GROUPED),
    "windows, V1 1x2 to V2 2": (UCX, v1(1, 2), v2(2), WINDOWS),
    "1x2 to 2x2": (CPP_NIXL, v1(1, 2), v1(2, 2), FULL),
    "states, 2 to 1": (CPP_NIXL, v2(2), v2(1), HYBRID),
    "MLA, 2 to 1x2": (CPP_NIXL, v2(2), v2(1, 2), LATENT),
    "windows, 2x2 to 2": (CPP_NIXL, v2(2, 2), v2(2), WINDOWS),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("processes", "case"), [(CASES[name][0], name) for name in CASES], indirect=["processes"], ids=str
)
def test_what_arrives_on_every_rank_is_what_was_sent_and_nothing_else_changes(processes: Processes, case: str) -> None:
    pairing, context, generation, model = CASES[case]
    assert isinstance(pairing, Pairing)
    with opened(processes, context, generation, model) as world:
        for request, chunks in ((1, [len(PROMPT)]), (2, [9, 20, len(PROMPT)])):
            world.prefill(request, chunks[:-1])
            params = world.receive(request)
            assert params.ctx_request_id == request
            world.prefill(request, chunks[-1:])
            ends = world.ends()
            assert [end["outcome"] for end in ends] == ["completed"] * len(world.alive), ends
            assert {end["aux"] for end in ends[len(world.context) :]} == {b"from here"}
            assert [rank.ask("wrong_bytes", request_id=request, seed=request) for rank in world.generation] == [
                0 for _ in world.generation
            ]
            world.free(request)
        world.settle()
