from faults.harness import Cast, end_of, over_tcp, prepare

HAND_OFFS = 1000
BLOCKS = 4


def compare_each(cast: Cast, hand_offs: int) -> None:
    generation, context = (
        cast.start(role, blocks=64, kv_transfer_checksum=False) for role in ("generation", "context")
    )
    for _ in range(hand_offs):
        request, params = prepare(cast, context, generation, blocks=BLOCKS)
        generation.ask("receive", request=request, **params)
        context.ask("respond", request=request)
        seen = generation.ask("wait_and_compare", request=request, seed=request)
        assert seen == {"completed": [request], "wrong": 0}
        assert end_of(context, request, seconds=5)["outcome"] == "completed"
        for worker in (context, generation):
            worker.ask("free", request=request)


def test_the_bytes_are_there_whenever_a_hand_off_is_said_to_be_complete(cast: Cast) -> None:
    compare_each(cast, HAND_OFFS)


@over_tcp
def test_the_bytes_are_out_of_the_socket_whenever_a_hand_off_is_said_to_be_complete(cast: Cast) -> None:
    compare_each(cast, HAND_OFFS)
