import select
import subprocess
import sys

import numpy as np
import pytest
import toytcp_kvferry
from toytcp_kvferry.agent import ToyTcpAgent

from kvferry.dispatcher import resolve
from kvferry.testing.worker_pair import worker_pair
from kvferry_plugins.errors import BackendUnavailableError, KvferryError, TransferError
from kvferry_plugins.transceiver import Fence, Region
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

MIB = 1 << 20
CONFIG = {"cache_transceiver_config": {"backend": "TOYTCP"}}
WRITES = """
import sys
import numpy as np
from toytcp_kvferry.agent import ToyTcpAgent
from kvferry_plugins.transceiver import Region
from kvferry_plugins.types import AgentSpec
agent = ToyTcpAgent(AgentSpec("TOYTCP", "dies", "cpu"))
print(agent.local_descriptor().decode(), flush=True)
memory = np.full(1000, 9, dtype=np.uint8)
agent.register([Region(memory.ctypes.data, 1000)])
peer = agent.connect(sys.argv[1].encode())
agent.submit(peer, *np.array([[memory.ctypes.data], [int(sys.argv[2])], [1000]]))
for _ in range(100):
    agent.poll()
"""


class Side:
    """An agent and the memory that it serves."""

    def __init__(self, name, nbytes=8 * MIB, value=0):
        self.agent = ToyTcpAgent(AgentSpec("TOYTCP", name, "cpu"))
        self.memory = np.full(nbytes, value, dtype=np.uint8)
        self.base = self.memory.ctypes.data
        self.registration = self.agent.register([Region(self.base, nbytes)])

    def write(self, peer, target, offsets, size):
        offsets = np.asarray(offsets, dtype=np.int64)
        return self.agent.submit(peer, self.base + offsets, target.base + offsets, np.full(len(offsets), size))


@pytest.fixture
def writer():
    side = Side("writer")
    side.memory[:] = np.random.default_rng(1).integers(0, 256, len(side.memory), dtype=np.uint8)
    yield side
    side.agent.close()


@pytest.fixture
def target():
    side = Side("target")
    yield side
    side.agent.close()


def outcome(writer, target):
    """Run both sides, asleep until a descriptor is ready, to the next completion."""
    while not (completions := writer.agent.poll()):
        target.agent.poll()
        ready, _, _ = select.select([writer.agent.wakeup_fd(), target.agent.wakeup_fd()], [], [], 10)
        assert ready, "neither side has anything to do, and nothing has ended"
    (completion,) = completions
    return completion


def test_auto_falls_back_to_the_one_runtime_that_it_declares(kvferry_registry):
    registry = kvferry_registry(toytcp_kvferry)

    plan = resolve(CONFIG, model="OtherForCausalLM", registry=registry, environ={})

    assert (plan.backend, plan.runtime, plan.providers.backend) == ("TOYTCP", "PYTHON", "toytcp_kvferry")
    explicit = {"cache_transceiver_config": {"backend": "TOYTCP", "transceiver_runtime": "CPP"}}
    with pytest.raises(KvferryError, match="TOYTCP does not run under CPP"):
        resolve(explicit, model="OtherForCausalLM", registry=registry, environ={})


def test_a_hand_off_arrives_by_value(kvferry_registry):
    registry = kvferry_registry(toytcp_kvferry)
    agents = [registry.create_transfer_agent("toytcp_kvferry", AgentSpec("TOYTCP", name, "cpu")) for name in "ab"]

    with worker_pair(context_agent=agents[0], generation_agent=agents[1]) as pair:
        request = pair.prefill(1, tuple(range(30)))
        pair.context.transceiver.respond_and_send_async(request)
        pair.generation.transceiver.request_and_receive_sync(pair.admit(request, 11))

        assert (pair.context.blocks(1) == pair.generation.blocks(11)).all()
        assert pair.context.blocks(1).any()


def test_a_registration_that_ends_on_the_way_refuses_the_rest(writer, target):
    peer = writer.agent.connect(target.agent.local_descriptor())
    writer.write(peer, target, [0], len(writer.memory))
    while not target.memory[0] and not target.memory[1]:
        writer.agent.poll()
        target.agent.poll()

    target.agent.deregister(target.registration)

    written = target.memory.copy()
    assert not outcome(writer, target).ok
    assert (target.memory == written).all()


def test_who_does_not_know_the_token_writes_nothing(writer, target):
    name = target.agent._token.hex().encode()
    peer = writer.agent.connect(target.agent.local_descriptor().replace(name, b"00" * 16))

    writer.write(peer, target, [0], 1000)

    assert not outcome(writer, target).ok
    assert not target.memory.any()


def test_a_connection_that_broke_fails_what_is_in_flight_and_is_made_again(writer, target):
    peer = writer.agent.connect(target.agent.local_descriptor())
    writer.write(peer, target, [0], 1000)
    assert outcome(writer, target).ok
    writer.write(peer, target, [0], len(writer.memory))
    (accepted,) = target.agent._streams.values()
    target.agent._drop(accepted)

    completion = outcome(writer, target)
    assert not completion.ok
    assert "broke" in completion.error
    writer.write(peer, target, [0], len(writer.memory))
    assert outcome(writer, target).ok
    assert (target.memory == writer.memory).all()


def test_what_a_fenced_writer_had_sent_never_lands(tmp_path, target):
    program = tmp_path / "writes.py"
    program.write_text(WRITES)
    arguments = [target.agent.local_descriptor().decode(), str(target.base)]
    writing = subprocess.Popen([sys.executable, str(program), *arguments], stdout=subprocess.PIPE)
    peer = target.agent.connect(writing.stdout.readline())
    writing.communicate()

    assert target.agent.fence(peer) is Fence.FENCED
    for _ in range(10):
        target.agent.poll()
    assert not target.memory.any()


@pytest.mark.parametrize("body", [b"", b"garbage", b"[]", b"[1, 2, 3, 4, 5, 6]", b'{"format": "toytcp/1"}'])
def test_a_descriptor_that_is_none_of_ours_is_refused(writer, body):
    with pytest.raises(TransferError, match="describes no TOYTCP agent"):
        writer.agent.connect(body)


def test_a_descriptor_of_another_version_is_refused(writer, target):
    with pytest.raises(TransferError, match="'toytcp/9'"):
        writer.agent.connect(target.agent.local_descriptor().replace(b"toytcp/1", b"toytcp/9"))


def test_it_listens_on_loopback_unless_told_where_else(monkeypatch, target):
    beyond = AgentSpec("TOYTCP", "beyond", "cpu", options={LOOPBACK_ONLY: False})
    assert target.agent._listener.getsockname()[0] == "127.0.0.1"
    monkeypatch.delenv("TOYTCP_HOST", raising=False)
    with pytest.raises(BackendUnavailableError, match="set TOYTCP_HOST"):
        ToyTcpAgent(beyond)
    monkeypatch.setenv("TOYTCP_HOST", "127.0.0.2")
    agent = ToyTcpAgent(beyond)
    assert agent._listener.getsockname()[0] == "127.0.0.2"
    agent.close()


def test_the_probe_says_that_it_would_work_here():
    report = toytcp_kvferry.probe()

    assert (report["usable"], report["library"], report["problems"]) == (True, "toytcp 1.0", [])
