import pytest

from kvferry_backends.nixl_agent import NixlAgent
from kvferry_plugins.errors import BackendUnavailableError, TransferError
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

MIB = 1 << 20

OVER_CMA_ONLY = pytest.mark.parametrize("transports", [{}], ids=["cma"])
"""For what no transport changes."""

OVER_TCP_ONLY = pytest.mark.parametrize("transports", [{"UCX_TLS": "tcp,self"}], ids=["tcp"])
"""For what the conformance kit looks at over CMA."""


@pytest.fixture
def agent():
    agent = NixlAgent(AgentSpec("NIXL", "alone", "cpu", options={LOOPBACK_ONLY: True}))
    yield agent
    agent.close()


@OVER_TCP_ONLY
@pytest.mark.parametrize("how", [{"pieces": 1}, {"pieces": 1024, "seed": 7}], ids=["one piece", "shuffled pieces"])
def test_what_is_written_arrives_and_nothing_is_left_over(pair, how):
    writer, target = pair
    writer.ask("fill", seed=1)
    transfer = writer.write(target, writer.peer, **how)
    assert writer.ask("outcome", transfer=transfer) == {"ok": True, "error": None}
    assert target.ask("count", seed=1) == target.nbytes
    writer.ask("disconnect", peer=writer.peer)
    assert writer.ask("leaks") == [0, 0, 0]
    writer.ask("close")
    assert (writer.end(), target.end()) == (0, 0)


@OVER_TCP_ONLY
def test_a_completion_means_that_the_bytes_are_there_a_thousand_times(pair, tmp_path):
    writer, target = pair
    board = tmp_path / "board"
    board.write_bytes(bytes(16))
    writer.tell(
        "write_rounds", peer=writer.peer, address=target.address, nbytes=256 << 10, rounds=1000, board=str(board)
    )
    assert target.ask("check_rounds", nbytes=256 << 10, rounds=1000, board=str(board)) == 0
    assert writer.answer() is None


@OVER_TCP_ONLY
def test_a_connection_that_breaks_fails_a_transfer_and_is_made_again(pair):
    writer, target = pair
    assert writer.ask("outcome", transfer=writer.write(target, writer.peer))["ok"]
    target.ask("break_connections")
    outcomes = [writer.ask("outcome", transfer=writer.write(target, writer.peer)) for _ in range(5)]
    assert outcomes[-1] == {"ok": True, "error": None}, outcomes


@OVER_TCP_ONLY
def test_a_target_that_does_not_poll_blocks_nobody(pair, start):
    writer, target = pair
    target.ask("set_polling", on=False)
    transfer = writer.write(target, writer.peer, pieces=4)
    assert writer.ask("outcome", transfer=transfer, seconds=0.3) is None  # the connection needs both sides
    other = start("other", 64 * MIB)
    peer = writer.ask("connect", descriptor=other.descriptor)
    assert writer.ask("outcome", transfer=writer.write(other, peer))["ok"]
    target.ask("set_polling", on=True)
    assert writer.ask("outcome", transfer=transfer)["ok"]


def test_disconnecting_in_flight_reports_nothing_and_forgets_the_peer_when_it_may(pair):
    writer, target = pair
    target.ask("set_polling", on=False)
    transfer = writer.write(target, writer.peer)
    assert writer.ask("outcome", transfer=transfer, seconds=0.1) is None
    writer.ask("disconnect", peer=writer.peer)
    assert writer.ask("leaks") == [1, 0, 1]  # a handle released in flight would say success, and land all the same
    target.ask("set_polling", on=True)
    assert writer.ask("outcome", transfer=transfer, seconds=0.5) is None
    assert writer.ask("leaks") == [0, 0, 0]


def test_an_agent_is_not_its_own_peer(agent):
    with pytest.raises(TransferError, match="its own peer"):
        agent.connect(agent.local_descriptor())


def test_ucx_without_a_needed_transport_is_a_backend_that_is_not_available(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "posix,self")
    with pytest.raises(BackendUnavailableError, match="UCX_TLS='posix,self': add tcp"):
        NixlAgent(AgentSpec("NIXL", "nobody", "cpu", options={LOOPBACK_ONLY: True}))


def test_the_library_is_named_with_its_version(agent):
    assert agent.library.startswith("nixl 1.")
    assert agent.wakeup_fd() is None


@OVER_CMA_ONLY
def test_an_agent_for_loopback_only_listens_nowhere_else(pair):
    writer, _ = pair
    listening = writer.ask("listening")
    assert listening
    assert all(address.startswith("0100007F:") for address in listening), listening


def test_the_thread_that_connects_gets_the_context_of_the_agents_device(monkeypatch):
    entered = []
    monkeypatch.setattr("torch.cuda.set_device", entered.append)
    agents = [
        NixlAgent(AgentSpec("NIXL", name, device, options={LOOPBACK_ONLY: True}))
        for name, device in (("gpu", "cuda:0"), ("host", "cpu"))
    ]

    for agent, other in (agents, agents[::-1]):
        agent.connect(other.local_descriptor())

    assert entered == ["cuda:0"]
    for agent in agents:
        agent.close()
