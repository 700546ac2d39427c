import pytest


@pytest.fixture
def start(start_agent):
    return lambda name, memory, **options: start_agent("ucx", name, {"AGENT_MEMORY": memory}, **options)


@pytest.mark.parametrize(
    ("memory", "option", "mapped"),
    [("shared", True, True), ("shared", False, False), ("private", True, False), ("file", True, False)],
    ids=["shared", "turned off", "private", "a file that could shrink"],
)
def test_only_shared_memory_that_cannot_shrink_is_mapped_and_all_else_goes_over_the_transport(
    start, memory, option, mapped
):
    writer, target = start("writer", "private", map_peers=option), start("target", memory)
    peer = writer.ask("connect", descriptor=target.descriptor)
    assert writer.ask("maps", peer=peer) is mapped
    writer.ask("fill", seed=1)
    for pieces in (1, 4096):
        transfer = writer.ask("write", peer=peer, address=target.address, pieces=pieces)
        assert writer.ask("outcome", transfer=transfer) == {"ok": True, "error": None}
    assert target.ask("wrong_bytes", seed=1) == 0


@pytest.mark.parametrize("offset", [1, 63, 64, 100])
def test_bytes_that_do_not_begin_on_a_cache_line_arrive_and_their_neighbours_stay(start, offset):
    writer, target = start("writer", "shared"), start("target", "shared")
    peer = writer.ask("connect", descriptor=target.descriptor)
    writer.ask("fill", seed=2)
    nbytes = (2 << 20) + 37
    transfer = writer.ask("write_range", peer=peer, here=7, there=target.address + offset, nbytes=nbytes)
    assert writer.ask("outcome", transfer=transfer)["ok"]
    assert target.ask("equals", seed=2, at=7, here=offset, nbytes=nbytes) is True
    assert target.ask("zeros_outside", here=offset, nbytes=nbytes) is True
