import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from faults.listening import listeners

from kvferry_backends.agent_descriptor import decode, encode
from kvferry_backends.mooncake_agent import MooncakeAgent
from kvferry_plugins.errors import BackendUnavailableError, TransferError
from kvferry_plugins.layout import PoolCopy, dense_pool
from kvferry_plugins.transceiver import Region
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

MIB = 1 << 20
SPEC = AgentSpec("MOONCAKE", "alone", "cpu", runtime="CPP", options={LOOPBACK_ONLY: True})


@pytest.fixture
def script():
    return Path(__file__).parent / "mooncake_child.py"


@pytest.fixture
def transports():
    return {}


@pytest.fixture(scope="module")
def agents():
    """Two agents, of which the second is as good as a peer."""
    pair = MooncakeAgent(SPEC), MooncakeAgent(SPEC)
    yield pair
    for agent in pair:
        agent.close()


@pytest.fixture
def agent(agents):
    return agents[0]


@pytest.fixture
def other(agents):
    return agents[1]


@pytest.fixture
def join(agents):
    """Has both agents register their memory; gives the first, and what it calls the second."""
    writer, reader = agents
    registered = []

    def joined(source, target):
        for agent, memory in ((writer, source), (reader, target)):
            registered.append((agent, agent.register([Region(memory.ctypes.data, memory.nbytes)])))
        return writer, writer.connect(reader.local_descriptor())

    yield joined
    for peer in list(writer._peers):
        writer.disconnect(peer)
    for agent, registration in registered:
        agent.deregister(registration)


@pytest.mark.parametrize(
    "how",
    [{"pieces": 1}, {"pieces": 8192, "seed": 8}],
    ids=["one piece", "more pieces than Mooncake takes"],
)
def test_what_is_written_arrives_and_nothing_is_left_over(pair, how):
    writer, target = pair
    writer.ask("fill", seed=1)
    transfer = writer.write(target, writer.peer, **how)
    assert writer.ask("outcome", transfer=transfer) == {"ok": True, "error": None}
    assert target.ask("count", seed=1) == target.nbytes
    writer.ask("disconnect", peer=writer.peer)
    writer.until("leaks", [0, 0, 0])
    writer.ask("close")
    assert (writer.end(), target.end()) == (0, 0)


def test_an_agent_for_loopback_only_takes_no_connection_from_another_device(pair):
    for side in pair:
        found = listeners(side.process.pid)
        assert len(found) == 2
        assert all(listener.is_kept_to_loopback for listener in found), found


def test_nothing_is_said_on_stdout_and_a_start_is_silent(script):
    child = subprocess.run(
        [sys.executable, script, "quiet", "4096"], input="", capture_output=True, text=True, timeout=60, check=True
    )
    assert len(child.stdout.splitlines()) == 1
    assert json.loads(child.stdout)["descriptor"]
    assert child.stderr == ""


def test_block_lists_are_planned_and_blocks_that_the_peer_does_not_want_stay(join):
    source, target = (np.zeros((16, 4096), dtype=np.uint8) for _ in range(2))
    source[:] = np.arange(1, 17)[:, None]
    writer, peer = join(source, target)
    block_map = writer.block_map(PoolCopy(_pool(source), _pool(target), np.array([[0, 0, 4096]])))
    transfer = writer.submit_blocks(
        peer, block_map, np.array([3, 4, 9, 0], dtype=np.int32), np.array([7, 8, -1, 2], dtype=np.int32)
    )
    assert _wait(writer, transfer).ok
    expected = np.zeros(16)
    expected[[7, 8, 2]] = [4, 5, 1]
    assert (target == expected[:, None]).all()
    with pytest.raises(TransferError, match="cannot write these blocks"):
        writer.submit_blocks(peer, block_map, np.array([99], dtype=np.int32), np.array([1], dtype=np.int32))


def test_progress_is_told_until_a_transfer_is_over(join):
    source, target = (np.zeros(192 * MIB, dtype=np.uint8) for _ in range(2))
    writer, peer = join(source, target)
    transfer = writer.submit(peer, *_whole(source, target))
    seen = {writer.progress_bytes(transfer)}
    while not (completions := writer.poll()):
        seen.add(writer.progress_bytes(transfer))
        time.sleep(1e-3)
    assert completions[0].ok
    assert seen <= {0, 64 * MIB, 128 * MIB, 192 * MIB}
    assert len(seen) > 1
    assert writer.progress_bytes(transfer) is None
    assert not writer.cancel(transfer)


def test_a_cancelled_transfer_ends_with_its_reason_and_writes_nothing_after_its_end(join):
    source, target = (np.zeros(512 * MIB, dtype=np.uint8) for _ in range(2))
    source[:] = 1
    writer, peer = join(source, target)
    transfer = writer.submit(peer, *_whole(source, target))
    while not target[0]:
        time.sleep(1e-4)
    assert writer.cancel(transfer, "no longer wanted")
    completion = _wait(writer, transfer)
    assert (completion.ok, completion.error) == (False, "no longer wanted")
    written = int(np.count_nonzero(target))
    assert 0 < written < len(target)
    target[:] = 0
    assert not writer.poll()
    assert not target.any()


@pytest.mark.parametrize("offset", [-4096, 4096, 1 << 40])
def test_memory_that_an_end_has_not_registered_is_refused_before_anything_is_posted(join, offset):
    source, target = (np.zeros(64 << 10, dtype=np.uint8) for _ in range(2))
    writer, peer = join(source, target)
    src, dst, nbytes = _whole(source, target)
    with pytest.raises(TransferError, match="not registered by alone-"):
        writer.submit(peer, src, dst + offset, nbytes)
    with pytest.raises(TransferError, match="not registered by this agent"):
        writer.submit(peer, src + offset, dst, nbytes)


def test_a_registration_that_fails_leaves_nothing_registered(agent):
    memory = np.zeros(8192, dtype=np.uint8)
    address = memory.ctypes.data
    with pytest.raises(TransferError, match=r"could not register 8192 bytes .* overlaps"):
        agent.register([Region(address, 4096), Region(address, 8192)])
    with pytest.raises(TransferError, match="it has no bytes"):
        agent.register([Region(address, 4096), Region(address + 4096, 0)])
    agent.deregister(agent.register([Region(address, 8192)]))


def test_memory_of_another_device_is_refused(agent):
    with pytest.raises(TransferError, match="memory on cpu, not on cuda:0"):
        agent.register([Region(4096, 4096, "cuda:0")])
    with pytest.raises(BackendUnavailableError, match="built without CUDA"):
        MooncakeAgent(AgentSpec("MOONCAKE", "nobody", "cuda:0"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: b"",
        lambda body: body[: len(body) // 2],
        lambda body: body.replace(b"\xa9127.0.0.1", b"\xa9127.0.0.9"),
        lambda body: body.replace(b"\xa8mooncake", b"\xa8kvferry!"),
    ],
    ids=["empty", "cut off", "one byte wrong", "another transport"],
)
def test_a_descriptor_that_is_not_one_of_ours_is_refused(agent, other, spoil):
    with pytest.raises(TransferError):
        agent.connect(spoil(other.local_descriptor()))


def test_a_process_that_comes_to_the_port_of_a_former_one_is_not_taken_for_it(agents, join):
    source, target = (np.zeros(64 << 10, dtype=np.uint8) for _ in range(2))
    source[:] = 1
    writer, former = join(source, target)
    transfer = writer.submit(former, *_whole(source, target))
    assert _wait(writer, transfer).ok
    later = msgspec.structs.replace(decode(agents[1].local_descriptor(), "mooncake"), key=bytes(16), name="later")
    peer = writer.connect(encode(later))
    assert peer != former
    target[:] = 0
    assert _wait(writer, writer.submit(peer, *_whole(source, target))).ok
    assert target.all()
    segments = [writer._peers[each].poster._segment for each in (former, peer)]
    assert segments[0].replace("127.0.0.1:", "127.0.0.2:") == segments[1]


def test_an_agent_is_not_its_own_peer(agent):
    with pytest.raises(TransferError, match="its own peer"):
        agent.connect(agent.local_descriptor())


def test_ports_that_are_all_taken_are_an_error_that_names_them(monkeypatch):
    taken = [socket.create_server(("", port)) for port in _neighbours()]
    monkeypatch.setenv("MC_MIN_RPC_PORT", str(taken[0].getsockname()[1]))
    monkeypatch.setenv("MC_MAX_RPC_PORT", str(taken[1].getsockname()[1]))
    script = (
        "from kvferry_backends.mooncake_library import start_engine\n"
        "from kvferry_plugins.errors import BackendUnavailableError\n"
        "try: start_engine(device='cpu', loopback_only=True)\n"
        "except BackendUnavailableError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout
    for listener in taken:
        listener.close()
    assert "No valid port" in said
    assert "MC_MIN_RPC_PORT" in said


@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        ("raise ImportError('libibverbs.so.1: cannot open shared object file')", "apt-get install -y libibverbs1"),
        ("import nowhere", "pip install mooncake-transfer-engine-non-cuda"),
    ],
)
def test_a_library_that_does_not_load_is_an_error_and_a_finding_that_say_what_to_install(tmp_path, engine, advice):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text(engine)
    script = (
        "import json\n"
        "from kvferry_backends.mooncake_library import load_mooncake\n"
        "from kvferry_backends.mooncake_probe import probe\n"
        "try: load_mooncake()\n"
        "except Exception as error: print(json.dumps([type(error).__name__, str(error), probe()]))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, timeout=60).stdout
    kind, message, report = json.loads(said)
    assert kind == "BackendUnavailableError"
    assert advice in message
    assert not report["usable"]
    assert report["problems"][0]["fix"].startswith(advice)


def test_a_version_whose_writes_are_not_acknowledged_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.3.9")
    with pytest.raises(BackendUnavailableError, match=r"0\.3\.9 says .* install 0\.3\.13 or later"):
        MooncakeAgent(SPEC)


def test_acknowledgements_that_the_operator_turned_off_are_refused(monkeypatch):
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(BackendUnavailableError, match="unset it"):
        MooncakeAgent(SPEC)


def _neighbours():
    """Two ports beside each other that are free."""
    for port in range(23_000, 24_000, 2):
        try:
            for each in (port, port + 1):
                socket.create_server(("", each)).close()
        except OSError:
            continue
        return port, port + 1
    raise AssertionError("no two free ports beside each other")


def _whole(source, target):
    return tuple(np.array([value], dtype=np.int64) for value in (source.ctypes.data, target.ctypes.data, source.nbytes))


def _pool(blocks):
    return dense_pool(
        layers=(0,),
        kv_heads=1,
        head_dim=64,
        tokens_per_block=8,
        item_bytes=4,
        num_blocks=len(blocks),
        base=blocks.ctypes.data,
    )


def _wait(agent, transfer):
    while not (completions := agent.poll()):
        time.sleep(1e-3)
    assert [completion.id for completion in completions] == [transfer]
    return completions[0]
