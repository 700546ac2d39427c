"""Hand-offs between single ranks whose managers keep different things, by value, over the whole protocol."""

from dataclasses import replace

import pytest

from kvferry.testing.world_pair import Side, make_manager, world_pair
from kvferry.transceiver.mapping import share, wanted_ordinals
from kvferry_plugins.errors import HandshakeError
from kvferry_plugins.types import LayerShape, ModelGeometry, Role, RoleShape

SLIDING = ModelGeometry(3, 2, 8, "float32", (8, None, 8))
LATENT = LayerShape((RoleShape("latent", 1, 12),), "latent")
STATE = LayerShape((RoleShape("recurrent", 2, 20), RoleShape("conv", 4, 6)), "state")
ATTENTION = LayerShape((RoleShape("key", 2, 8), RoleShape("value", 2, 4)))
MIXED = ModelGeometry(3, 2, 8, "float32", (None,) * 3, (ATTENTION, STATE, LATENT))
PROMPT = tuple(range(100, 130))
CHECKED = {"kv_transfer_checksum": True}


def hand_over(pair, prompt=PROMPT, number=1):
    """The two ends of a hand-off that wrote what it should, and nothing else."""
    before = pair.snapshot()
    request = pair.prefill(number, prompt)
    pair.respond(request)
    received = pair.admit(request, number + 10)
    pair.receive(received)
    ends = [pair.ends(role)[0] for role in (Role.GENERATION, Role.CONTEXT)]
    if ends[0].outcome == "completed":
        assert pair.wrong_bytes(before, received, number) == 0
    return ends


@pytest.mark.parametrize(
    ("context", "generation"),
    [
        (Side(), Side(manager="V2")),
        (Side(manager="V2"), Side(manager="V2")),
        (Side(manager="V2", tokens_per_block=8), Side(manager="V2", tokens_per_block=4)),
        (Side(tokens_per_block=4), Side(manager="V2", tokens_per_block=8)),
        (Side(tokens_per_block=16), Side(tokens_per_block=4)),
        (Side(tokens_per_block=2), Side(tokens_per_block=8)),
    ],
    ids=str,
)
def test_managers_and_block_sizes_may_differ(context, generation):
    sides = (replace(side, config=CHECKED) for side in (context, generation))
    with world_pair(*sides, geometry=SLIDING) as pair:
        ends = hand_over(pair)
        assert [end.outcome for end in ends] == ["completed", "completed"], ends
        assert ends[0].nbytes == ends[1].nbytes > 0


def test_what_slid_out_of_a_window_and_padding_stay():
    token = 2 * 2 * 8 * 4
    with world_pair(Side(), Side(), geometry=SLIDING) as pair:
        everything = hand_over(pair)[0].nbytes
    with world_pair(Side(), Side(manager="V2"), geometry=SLIDING) as pair:
        needed = hand_over(pair)[0].nbytes
    assert everything == 3 * 30 * token
    assert 30 * token + 2 * 7 * token <= needed <= 30 * token + 2 * 10 * token


@pytest.mark.parametrize("chunked", [False, True])
def test_states_and_latent_rows_arrive(chunked):
    sides = (Side(manager="V2", tokens_per_block=tokens, config=CHECKED) for tokens in (8, 4))
    with world_pair(*sides, geometry=MIXED) as pair:
        before = pair.snapshot()
        request = pair.prefill(1, PROMPT)
        (context,) = pair.context
        received = pair.admit(request, 11)
        pair.receive(received)
        if chunked:
            for computed in (5, 8, 19):
                context.transceiver.respond_and_send_async(request, computed, last=False)
        pair.respond(request)
        assert [end.outcome for end in pair.ends(Role.GENERATION)] == ["completed"]
        assert pair.wrong_bytes(before, received, 1) == 0
        assert [end.outcome for end in pair.ends(Role.CONTEXT)] == ["completed"]


@pytest.mark.parametrize(
    ("context", "generation", "field", "advice"),
    [
        (Side(manager="V2"), Side(), "windows", "use_kv_cache_manager_v2"),
        (Side(tokens_per_block=4), Side(tokens_per_block=6), "tokens_per_block", "tokens_per_block"),
    ],
    ids=["V2 to V1", "neither divides"],
)
def test_what_a_context_worker_does_not_keep_is_a_refusal_that_says_what_to_set(context, generation, field, advice):
    with world_pair(context, generation, geometry=SLIDING) as pair:
        request = pair.prefill(1, PROMPT)
        pair.respond(request)
        pair.receive(pair.admit(request, 11))
        (end,) = pair.ends(Role.GENERATION)
        assert isinstance(end.error, HandshakeError)
        assert list(end.error.fields) == [field]
        assert advice in str(end.error)
        pair.context[0].transceiver.cancel_request(request)


def test_a_received_prefix_is_not_fetched_again_under_windows():
    with world_pair(Side(), Side(manager="V2"), geometry=SLIDING) as pair:
        prompt = tuple(range(32))
        first = hand_over(pair, prompt)[0]
        (generation,) = pair.generation
        generation.manager.commit(11, prompt)
        generation.manager.free(11)
        longer = (*prompt, *range(500, 512))
        request = pair.prefill(2, longer)
        pair.respond(request)
        received = pair.admit(request, 12)
        assert received.cached_tokens == 32
        pair.receive(received)
        again = pair.ends(Role.GENERATION)[0]
        assert again.outcome == "completed"
        assert 0 < again.nbytes < first.nbytes


@pytest.mark.parametrize(("blocks", "missing_tokens", "reused"), [(4, 0, 32), (1, 2, 16)])
def test_a_block_of_which_a_part_slid_away_at_the_source_is_never_reused(blocks, missing_tokens, reused):
    geometry = replace(SLIDING, windows=(16, None, 16))
    sides = Side(manager="V2", tokens_per_block=blocks), Side(manager="V2", tokens_per_block=4)
    prompt = tuple(range(33))
    with world_pair(*(replace(side, config=CHECKED) for side in sides), geometry=geometry) as pair:
        before = pair.snapshot()
        request = pair.prefill(1, prompt)
        pair.respond(request)
        received = pair.admit(request, 11)
        pair.receive(received)
        assert [pair.ends(role)[0].outcome for role in (Role.GENERATION, Role.CONTEXT)] == ["completed"] * 2
        stayed = missing_tokens * 2 * 2 * 2 * 32  # some of which happen to be right
        assert 0.9 * stayed <= pair.wrong_bytes(before, received, 1) <= stayed
        manager = pair.generation[0].manager
        manager.commit(11, prompt)
        manager.free(11)
        # 16: the full layers' blocks before the window; of the window nothing, as its first block is not whole
        assert manager.allocate(12, 34, prompt, history_tokens=33) == reused


GEMMA_3_270M = ModelGeometry(
    18, 1, 256, "bfloat16", tuple(None if (layer + 1) % 6 == 0 else 512 for layer in range(18))
)


def bytes_to_fetch(source, destination, prompt_tokens):
    """What a prompt takes, by both managers' layouts and the destination's table."""
    managers = [make_manager(side, GEMMA_3_270M, 0) for side in (source, destination)]
    try:
        managers[1].allocate(1, prompt_tokens + 1, history_tokens=prompt_tokens)
        tables = [
            table[ordinals.start : ordinals.stop]
            for table, ordinals in zip(
                managers[1].block_table(1),
                (wanted_ordinals(group, prompt_tokens, 0) for group in managers[1].layout.groups),
                strict=True,
            )
        ]
        overlap = share([managers[0].layout], [managers[1].layout])[0, 0]
        return overlap.expected(tables, prompt_tokens, 0)[0]
    finally:
        for manager in managers:
            manager.shutdown()


@pytest.mark.parametrize("source", ["V1", "V2"])
def test_of_gemma_at_4096_tokens_v2_moves_at_most_four_tenths_of_what_v1_moves(source):
    sides = {kind: Side(manager=kind, tokens_per_block=32, max_tokens=4160) for kind in ("V1", "V2")}
    everything = bytes_to_fetch(sides["V1"], sides["V1"], 4096)
    needed = bytes_to_fetch(sides[source], sides["V2"], 4096)
    assert everything == 18 * 4096 * 2 * 256 * 2
    assert (3 * 4096 + 15 * 511) / (18 * 4096) <= needed / everything <= 0.4
