from faults.harness import Cast, end_of, prepare

ROUNDS = 1000
BLOCKS = 4


def test_the_bytes_are_there_whenever_a_hand_off_is_said_to_be_complete(cast: Cast) -> None:
    generation = cast.start("generation", blocks=64, kv_transfer_checksum=False)
    context = cast.start("context", blocks=64, kv_transfer_checksum=False)
    for _ in range(ROUNDS):
        request, params = prepare(cast, context, generation, blocks=BLOCKS)
        generation.ask("receive", request=request, **params)
        context.ask("respond", request=request)
        seen = generation.ask("wait_and_compare", request=request, seed=request)
        assert seen == {"completed": [request], "wrong": 0}
        assert end_of(context, request, seconds=5)["outcome"] == "completed"
        for worker in (context, generation):
            worker.ask("free", request=request)
