import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import zmq

from kvferry.testing.worker_pair import SHORT_CLOCKS, SMALL_GEOMETRY, SMALL_MODEL, WorkerPair, running_worker
from kvferry.transceiver.channel import is_loopback
from kvferry.transceiver.wire import MAX_MESSAGE_BYTES, Hello, Ping, Refuse
from kvferry.transceiver.wire_layout import to_wire
from kvferry_plugins.errors import ConfigError, HandshakeError, PeerLostError, TransferError
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.types import Peer, Role


@pytest.fixture
def unlike():
    """A pair whose generation worker differs by the options given."""
    with ExitStack() as stack:

        def start(config=None, **options):
            hub = ScriptedHub()
            context = stack.enter_context(
                running_worker(Role.CONTEXT, ScriptedAgent("context", hub=hub), dict(SHORT_CLOCKS))
            )
            generation = stack.enter_context(
                running_worker(
                    Role.GENERATION,
                    ScriptedAgent("generation", hub=hub),
                    {**SHORT_CLOCKS, **(config or {})},
                    **options,
                )
            )
            return WorkerPair(context, generation)

        yield start


def refused(pair, kit):
    request = pair.prefill(1, kit.PROMPT)
    with pytest.raises(HandshakeError) as caught:
        pair.generation.transceiver.request_and_receive_sync(pair.admit(request, 11))
    pair.context.transceiver.cancel_request(request)
    return caught.value


@pytest.mark.parametrize(
    ("field", "options", "values"),
    [
        ("tokens_per_block", {"tokens_per_block": 6}, (6, 4)),
        ("dtype", {"geometry": replace(SMALL_GEOMETRY, dtype="bfloat16")}, ("bfloat16", "float32")),
        ("kv_heads", {"geometry": replace(SMALL_GEOMETRY, kv_heads=4)}, (4, 2)),
        (
            "roles",
            {"geometry": replace(SMALL_GEOMETRY, head_dim=16)},
            ("key 64, value 64", "key 32, value 32"),
        ),
        ("layers", {"geometry": replace(SMALL_GEOMETRY, num_layers=1, windows=(None,))}, ([[0, 0]], [[0, 1]])),
        ("model.weights", {"model": {**SMALL_MODEL, "weights": "w1"}}, ("w1", "w0")),
        ("model.config", {"model": {**SMALL_MODEL, "config": "c1"}}, ("c1", "c0")),
        ("backend", {"backend": "OTHER"}, ("OTHER", "SCRIPTED")),
        ("checksum", {"config": {"kv_transfer_checksum": True}}, (True, False)),
    ],
)
def test_a_worker_that_differs_is_refused_before_memory_is_shown(unlike, kit, field, options, values):
    pair = unlike(**options)
    error = refused(pair, kit)
    assert tuple(error.fields[field]) == values
    assert field in str(error)
    for worker in (pair.context, pair.generation):
        assert worker.agent.counters.peers == 0
    assert kit.counters(pair.context)["handshakes_refused"] == 1
    kit.wait_until(lambda: pair.generation.transceiver.drained)


def test_a_refusal_lists_every_fatal_field(unlike, kit):
    error = refused(unlike(tokens_per_block=6, model={**SMALL_MODEL, "weights": "w1", "config": "c1"}), kit)
    assert {"tokens_per_block", "model.weights", "model.config"} <= set(error.fields)


def test_another_architecture_name_or_runtime_alone_is_fine(unlike, kit):
    pair = unlike(model={**SMALL_MODEL, "architecture": "Renamed"})
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    pair.generation.transceiver.request_and_receive_sync(pair.admit(request, 11))


def test_other_library_versions_are_a_warning(run_pair, raw_peer):
    pair = run_pair()
    peer = raw_peer(pair.context, libraries={"kvferry": "0.0.0"})
    peer.greet(pair.context.transceiver.endpoint)
    (link,) = pair.context.transceiver.status_dump()["peers"]
    assert link["state"] == "ready"
    assert "libraries" in link["warnings"][0]


@pytest.mark.parametrize(("theirs", "refuses"), [((3, 4), True), ((1, 1), True), ((1, 2), False), ((2, 9), False)])
def test_protocol_versions_are_ranges_that_must_overlap(run_pair, raw_peer, theirs, refuses):
    pair = run_pair()
    peer = raw_peer(pair.context)
    address = peer.channel.connect(pair.context.transceiver.endpoint)
    peer.send(address, peer.hello(reply=False, protocol=theirs))
    _, answer = peer.expect(Refuse if refuses else Hello)
    if refuses:
        assert answer.field == "protocol"
        assert answer.fields == {"protocol": (list(theirs), [2, 2])}


def test_memory_before_fingerprints_is_refused(run_pair, raw_peer):
    pair = run_pair()
    peer = raw_peer(pair.context)
    address = peer.channel.connect(pair.context.transceiver.endpoint)
    peer.send(address, peer.hello(reply=False, memory=True))
    _, answer = peer.expect(Refuse)
    assert answer.field == "hello"
    assert pair.context.agent.counters.peers == 0


def test_a_layout_unlike_its_own_fingerprint_is_refused(run_pair, raw_peer, kit):
    pair = run_pair()
    peer = raw_peer(pair.context)
    address = peer.channel.connect(pair.context.transceiver.endpoint)
    peer.send(address, peer.hello(reply=False))
    peer.expect(Hello)
    layout = kit.replace(to_wire(peer.manager.layout), dtype="float64")
    peer.send(address, peer.hello(reply=False, memory=True, layout=layout))
    _, answer = peer.expect(Refuse)
    assert answer.field == "dtype"
    assert pair.context.agent.counters.peers == 0


@pytest.mark.parametrize("descriptor", [b"", b"nonsense", b"kvferry-scripted-agent\0nobody#1"])
def test_a_descriptor_that_the_agent_does_not_take_is_refused(run_pair, raw_peer, descriptor):
    pair = run_pair()
    peer = raw_peer(pair.context)
    address = peer.channel.connect(pair.context.transceiver.endpoint)
    peer.send(address, peer.hello(reply=False))
    peer.expect(Hello)
    peer.send(address, peer.hello(reply=False, memory=True, descriptor=descriptor))
    _, answer = peer.expect(Refuse)
    assert answer.field == "descriptor"


def test_the_refusing_side_tells_the_other_although_it_hangs_up(run_pair, raw_peer, kit):
    pair = run_pair()
    peer = raw_peer(pair.generation, "raw-context", dtype="float64")
    request = pair.prefill(1, kit.PROMPT)
    received = replace(pair.admit(request, 11), params=peer.params(request))
    pair.generation.transceiver.request_and_receive_async(received)
    address, _ = peer.expect(Hello)
    peer.send(address, peer.hello(reply=True))
    _, answer = peer.expect(Refuse)
    assert (answer.field, answer.fields) == ("dtype", {"dtype": ("float64", "float32")})
    (event,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    assert event.error.fields == {"dtype": ("float32", "float64")}
    pair.context.transceiver.cancel_request(request)


def test_a_peer_that_greets_again_after_a_long_time_is_taken_back(run_pair, raw_peer, kit):
    pair = run_pair()
    kit.set_clocks(pair.context, handshake=0.3)
    peer = raw_peer(pair.context)
    peer.greet(pair.context.transceiver.endpoint)
    time.sleep(0.4)
    address = peer.channel.connect(pair.context.transceiver.endpoint)
    peer.send(address, peer.hello(reply=False))
    peer.expect(Hello)
    pair.context.transceiver._loop.ask(lambda: pair.context.transceiver._loop._tick(), 1)
    peer.send(address, peer.hello(reply=False, memory=True))
    _, answer = peer.expect(Hello)
    assert answer.descriptor is not None


def test_a_greeting_that_is_never_finished_ends(run_pair, raw_peer, kit):
    pair = run_pair()
    kit.set_clocks(pair.context, handshake=0.2)
    peer = raw_peer(pair.context)
    address = peer.channel.connect(pair.context.transceiver.endpoint)
    peer.send(address, peer.hello(reply=False))
    peer.expect(Hello)
    kit.wait_until(lambda: not pair.context.transceiver.status_dump()["peers"])


# --- a context worker that is none -------------------------------------------------------------------------------


@pytest.fixture
def listener():
    """A TCP server that sends some bytes to whoever connects, and waits."""
    with ExitStack() as stack:

        def start(greeting=b"", *, hang_up=False):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            accepted = []

            def serve():
                while True:
                    try:
                        connection, _ = server.accept()
                    except OSError:
                        return
                    accepted.append(connection)
                    connection.sendall(greeting)
                    if hang_up:
                        connection.close()

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(lambda: [connection.close() for connection in accepted])
            stack.callback(thread.join)
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            return f"tcp://127.0.0.1:{server.getsockname()[1]}", accepted

        yield start


def fetch_from(pair, kit, endpoint):
    request = pair.prefill(1, kit.PROMPT)
    received = pair.admit(request, 11)
    received = replace(received, params=replace(received.params, ctx_info_endpoint=endpoint))
    try:
        pair.generation.transceiver.request_and_receive_sync(received)
    finally:
        pair.context.transceiver.cancel_request(request)
        assert kit.ledger_blocks(pair.generation) == {"source": 0, "destination": 0, "quarantine": 0}


@pytest.mark.parametrize(
    ("greeting", "hang_up"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + bytes(64), False),
        (bytes(range(256)), False),
        (b"", True),
    ],
    ids=["HTTP", "garbage", "hangs up"],
)
def test_who_speaks_another_protocol_is_a_lost_peer_at_once(run_pair, kit, listener, greeting, hang_up):
    pair = run_pair()
    endpoint, _ = listener(greeting, hang_up=hang_up)
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=endpoint):
        fetch_from(pair, kit, endpoint)
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize(("handshake", "admission"), [(0.3, 2.0), (2.0, 0.3)])
def test_who_never_answers_is_given_up_by_a_clock_and_no_block_is_in_doubt(
    run_pair, kit, listener, handshake, admission
):
    pair = run_pair()
    kit.set_clocks(pair.generation, handshake=handshake, admission=admission)
    endpoint, _ = listener()
    with pytest.raises((HandshakeError, TimeoutError), match="handshake"):
        fetch_from(pair, kit, endpoint)


def test_a_port_where_nobody_listens_is_a_lost_peer_at_once(run_pair, kit):
    pair = run_pair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="nobody listens"):
        fetch_from(pair, kit, f"tcp://127.0.0.1:{port}")
    assert time.monotonic() - started < 1.0


# --- trust --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://10.0.0.5:5555",
        "tcp://kv.example.org:5555",
        "tcp://127.0.0.1:0;10.0.0.5:5555",
        "tcp://127.0.0.1@10.0.0.5:5555",
        "tcp://127.0.0.1:1@10.0.0.5:5555",
        "tcp://127.0.0.1.example.org:5555",
        "tcp://[::1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:99999",
        "tcp://:5555",
        "ipc:///tmp/socket",
        "inproc://zeromq.zap.01",
        "http://127.0.0.1:80",
        "127.0.0.1:5555",
        "nonsense",
    ],
)
def test_an_endpoint_that_is_no_peer_is_refused_before_any_connection(run_pair, kit, monkeypatch, endpoint):
    pair = run_pair()

    def connect(*_):
        raise AssertionError("it connects")

    monkeypatch.setattr(zmq.Socket, "connect", connect)
    with pytest.raises(TransferError) as caught:
        fetch_from(pair, kit, endpoint)
    assert caught.value.field == "ctx_info_endpoint"
    assert not pair.generation.transceiver._shared.channel._dealers
    assert kit.counters(pair.generation) == {}


def test_a_loopback_endpoint_that_cannot_be_one_fails_its_request_alone(run_pair, kit):
    pair = run_pair()
    with pytest.raises(TransferError):
        fetch_from(pair, kit, "tcp://127.0.0.1:0")


@pytest.mark.parametrize(
    ("endpoint", "loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.9.1:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://127.0.0.1:65536", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://[::]:1", False),
        ("tcp://192.168.1.1:1", False),
    ],
)
def test_loopback_is_told_by_address(endpoint, loopback):
    assert is_loopback(endpoint) is loopback


def run_alone(**options):
    return running_worker(Role.CONTEXT, ScriptedAgent("alone", hub=ScriptedHub()), dict(SHORT_CLOCKS), **options)


def spec_options(worker, **changes):
    return replace(
        worker.transceiver._spec, create_agent=lambda _: ScriptedAgent("other", hub=ScriptedHub()), **changes
    )


@pytest.mark.parametrize(
    ("bind", "setting"),
    [
        ("tcp://192.0.2.1:0", "peers"),
        ("tcp://0.0.0.0:0", "bind"),
        ("tcp://*:0", "bind"),
        ("tcp://127.0.0.1:70000", "bind"),
        ("127.0.0.1:7000", "bind"),
        ("ipc:///tmp/x", "bind"),
    ],
)
def test_a_bad_address_to_bind_ends_the_start(bind, setting):
    from kvferry.transceiver.python_runtime import KvCacheTransceiverV2

    with run_alone() as worker, pytest.raises(ConfigError, match=bind.replace("*", "\\*")) as caught:
        KvCacheTransceiverV2(spec_options(worker, bind=bind))
    assert caught.value.setting == setting


def test_a_port_in_use_ends_the_start_at_once_naming_it():
    from kvferry.transceiver.python_runtime import KvCacheTransceiverV2

    with run_alone() as worker:
        taken = worker.transceiver.endpoint
        with pytest.raises(ConfigError, match=taken) as caught:
            KvCacheTransceiverV2(spec_options(worker, bind=taken))
    assert caught.value.setting == "bind"


def test_another_users_key_is_refused_by_the_context_worker(run_pair, kit, monkeypatch, tmp_path):
    """Both sides hold a key, but not the same: neither lets the other in."""
    from kvferry.transceiver.python_runtime import KvCacheTransceiverV2

    pair = run_pair()
    monkeypatch.setenv("KVFERRY_CURVE_KEY_FILE", str(tmp_path / "stranger.key"))
    agent = ScriptedAgent("stranger", hub=pair.context.agent.hub)
    request = pair.prefill(1, kit.PROMPT)
    received = pair.admit(request, 11)
    stranger = KvCacheTransceiverV2(replace(pair.generation.transceiver._spec, create_agent=lambda _: agent))
    kit.set_clocks(replace(pair.generation, transceiver=stranger), handshake=0.5)
    try:
        with pytest.raises((PeerLostError, HandshakeError)):
            stranger.request_and_receive_sync(received)
    finally:
        stranger.shutdown()
    assert pair.context.transceiver.status_dump()["peers"] == []
    pair.context.transceiver.cancel_request(request)


@pytest.mark.parametrize("known", [True, False])
def test_a_peer_with_a_key_of_its_own_must_be_configured(run_pair, kit, monkeypatch, tmp_path, known):
    from kvferry.transceiver.keys import load_or_make_key
    from kvferry.transceiver.python_runtime import KvCacheTransceiverV2

    pair = run_pair()
    here, there = (load_or_make_key(tmp_path / name) for name in ("here", "there"))
    context_agent, agent = (ScriptedAgent(name, hub=ScriptedHub()) for name in ("context", "generation"))
    agent._hub = context_agent._hub
    context_agent._hub.agents[agent.local_descriptor()] = agent
    peers = (Peer("tcp://127.0.0.1:9", there.public),) if known else ()
    monkeypatch.setenv("KVFERRY_CURVE_KEY_FILE", str(tmp_path / "here"))
    context = KvCacheTransceiverV2(
        replace(pair.context.transceiver._spec, create_agent=lambda _: context_agent, peers=peers)
    )
    monkeypatch.setenv("KVFERRY_CURVE_KEY_FILE", str(tmp_path / "there"))
    generation = KvCacheTransceiverV2(
        replace(
            pair.generation.transceiver._spec,
            create_agent=lambda _: agent,
            peers=(Peer(context.endpoint, here.public),),
        )
    )
    try:
        moved = WorkerPair(replace(pair.context, transceiver=context), replace(pair.generation, transceiver=generation))
        request = moved.prefill(1, kit.PROMPT)
        context.respond_and_send_async(request)
        received = moved.admit(request, 11)
        if known:
            generation.request_and_receive_sync(received)
            assert (moved.context.blocks(1) == moved.generation.blocks(11)).all()
        else:
            with pytest.raises(PeerLostError, match="peers"):
                generation.request_and_receive_sync(received)
            context.cancel_request(request)
    finally:
        generation.shutdown()
        context.shutdown()


# --- malformed messages -------------------------------------------------------------------------------------------


def test_who_sends_a_malformed_message_is_answered_once_and_ignored_and_others_go_on(run_pair, raw_peer, fetch, kit):
    pair = run_pair()
    peer = raw_peer(pair.context)
    address = peer.greet(pair.context.transceiver.endpoint)
    peer.send(address, b"\x81\xa4type\xa4NOPE")
    _, answer = peer.expect(Refuse)
    assert (answer.field, answer.key) == ("message", None)
    for message in (b"again", b"", peer.hello(reply=False), Ping("raw-peer", 1)):
        peer.send(address, message)
    assert peer.hears_nothing()
    assert kit.counters(pair.context)["malformed_messages"] == 1
    fetch(pair)
    assert pair.generation.transceiver.check_gen_transfer_status(1).completed == (11,)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)


def test_who_never_said_hello_may_not_have_anything(run_pair, raw_peer, kit):
    pair = run_pair()
    peer = raw_peer(pair.context)
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request)
    address = peer.channel.connect(pair.context.transceiver.endpoint)
    peer.send(address, peer.table(pair.context.transceiver.get_disaggregated_params(request)))
    _, refuse = peer.expect(Refuse)
    assert refuse.field == "hello"
    pair.context.transceiver.cancel_request(request)


def test_a_context_worker_that_sends_a_malformed_message_is_ignored_but_not_the_next_at_its_endpoint(
    run_pair, raw_peer, kit
):
    pair = run_pair()
    peer = raw_peer(pair.generation, "raw-context")
    request = pair.prefill(1, kit.PROMPT)
    received = pair.admit(request, 11)

    def fetch_again():
        pair.generation.transceiver.request_and_receive_async(replace(received, params=peer.params(request)))

    fetch_again()
    address = peer.answer_greeting()
    peer.send(address, b"junk")
    peer.expect(Refuse)
    assert pair.generation.transceiver.check_gen_transfer_status(1).failed == (11,)
    peer.agent.kill()  # its blocks were asked for: only the end of the writer frees them
    kit.wait_until(lambda: pair.generation.transceiver.drained)
    fetch_again()
    address, _ = peer.expect(Hello)
    peer.send(address, peer.hello(reply=True))
    assert pair.generation.transceiver.check_gen_transfer_status(1).failed == (11,)
    peer.incarnation = 2
    fetch_again()
    address, _ = peer.expect(Hello)
    peer.send(address, peer.hello(reply=True))
    _, memory = peer.expect(Hello)
    assert memory.descriptor is not None
    peer.send(address, Refuse(field="descriptor", reason="enough"))
    assert pair.generation.transceiver.check_gen_transfer_status(1).failed == (11,)
    pair.context.transceiver.cancel_request(request)


def test_a_message_that_is_too_long_costs_its_sender_the_connection_and_nobody_else(run_pair, raw_peer, fetch, kit):
    pair = run_pair()
    peer = raw_peer(pair.context)
    address = peer.greet(pair.context.transceiver.endpoint)
    peer.send(address, bytes(MAX_MESSAGE_BYTES + 1))
    fetch(pair)
    assert pair.generation.transceiver.check_gen_transfer_status(1).completed == (11,)
    assert pair.context.transceiver.check_context_transfer_status(1).completed == (1,)
    assert "malformed_messages" not in kit.counters(pair.context)
