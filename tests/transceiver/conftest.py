import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvferry.cache.manager_v1 import KVCacheManagerV1
from kvferry.testing.worker_pair import SMALL_GEOMETRY, Worker, WorkerPair, worker_pair
from kvferry.transceiver.channel import Address, Broken, Channel
from kvferry.transceiver.keys import load_or_make_key
from kvferry.transceiver.params import STATE_VERSION, OpaqueState, pack_state, prompt_digest
from kvferry.transceiver.wire import PROTOCOL, AnyMessage, Hello, Key, Ping, Table, decode, encode
from kvferry.transceiver.wire_layout import to_wire
from kvferry_plugins.testing import ScriptedAgent, ScriptedHub
from kvferry_plugins.transceiver import Region
from kvferry_plugins.types import DisaggregatedParams, ManagerSpec, TransferRequest

PROMPT = tuple(range(100, 130))
"""Eight blocks of four tokens, the last one half full."""

TOKEN_BYTES = 256
"""Of the small geometry."""


def wait_until(condition: Callable[[], Any], seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def set_clocks(worker: Worker, **seconds: Any) -> None:
    shared = worker.transceiver._shared
    shared.clocks = replace(shared.clocks, **seconds)


def counters(worker: Worker) -> dict[str, int]:
    return worker.transceiver.status_dump()["counters"]


def ledger_blocks(worker: Worker) -> dict[str, int]:
    return worker.transceiver.status_dump()["ledger"]["blocks"]


def receive_state(worker: Worker) -> str | None:
    """The state of the only receive; None before the loop has heard of it, or after its end."""
    receives = worker.transceiver.status_dump()["receives"]
    return receives[0]["state"] if receives else None


def send_state(worker: Worker) -> str | None:
    """The state of the only send."""
    sends = worker.transceiver.status_dump()["sends"]
    return sends[0]["state"] if sends else None


def assert_clean(worker: Worker) -> None:
    """Nothing is held by a transfer, nothing is in flight, and all blocks come back."""
    wait_until(lambda: worker.transceiver.drained)
    wait_until(lambda: worker.transceiver.status_dump()["sends"] == [])
    wait_until(lambda: worker.transceiver.status_dump()["receives"] == [])
    assert worker.agent.counters.in_flight == 0
    assert counters(worker).get("internal_errors", 0) == 0
    for request_id in list(worker.manager._tables):
        worker.manager.free(request_id)
    statistics = worker.manager.statistics()
    assert statistics.in_use == 0
    assert statistics.free + statistics.cached == statistics.total


@pytest.fixture
def run_pair() -> Iterator[Callable[..., WorkerPair]]:
    """Start a pair; at the end nothing may be left of any request. ``script`` is the context agent's."""
    with ExitStack() as stack:
        pairs: list[WorkerPair] = []

        def run(script: Any = (), *, clean: bool = True, **options: Any) -> WorkerPair:
            if script:
                options["context_agent"] = ScriptedAgent("context", script, hub=ScriptedHub())
            pair = stack.enter_context(worker_pair(**options))
            if clean:
                pairs.append(pair)
            return pair

        yield run
        for pair in pairs:
            for worker in (pair.context, pair.generation):
                assert_clean(worker)


@dataclass
class RawPeer:
    """One that speaks the protocol by hand, as a generation worker or as a context worker."""

    agent: ScriptedAgent
    fingerprint: dict[str, Any]
    identity: str
    incarnation: int = 1
    channel: Channel = field(init=False)
    manager: KVCacheManagerV1 = field(init=False)

    def __post_init__(self) -> None:
        self.channel = Channel("tcp://127.0.0.1:0", self.identity, load_or_make_key(), ())
        self.manager = KVCacheManagerV1(ManagerSpec("V1", SMALL_GEOMETRY, 4, 256, 0.1, True, "cpu"))
        pool = self.manager.layout.pools[0]
        self.agent.register([Region(pool.base, pool.nbytes)])

    def close(self) -> None:
        self.channel.close()
        self.agent.close()
        self.manager.shutdown()

    def send(self, address: Address, message: AnyMessage | bytes) -> None:
        assert self.channel.send(address, message if isinstance(message, bytes) else encode(message))

    def frames(self, seconds: float) -> Iterator[tuple[Address, AnyMessage]]:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready = dict(self.channel.poller.poll(left * 1000))
            self.agent.poll()
            for frame in self.channel.receive(ready):
                if isinstance(frame, Broken):
                    continue
                message = decode(frame.body)
                if isinstance(message, Ping):
                    if not message.reply:
                        self.send(frame.sender, Ping(self.identity, self.incarnation, reply=True))
                    continue
                yield frame.sender, message

    def expect(self, kind: type, seconds: float = 3.0) -> tuple[Address, Any]:
        """Wait for a message of a kind, skipping others."""
        seen = []
        for sender, message in self.frames(seconds):
            if isinstance(message, kind):
                return sender, message
            seen.append(message)
        raise AssertionError(f"no {kind.__name__} came, but {seen}")

    def hears_nothing(self, seconds: float = 0.2) -> bool:
        return not list(self.frames(seconds))

    def hello(self, *, reply: bool, memory: bool = False, **changes: Any) -> Hello:
        hello = Hello(
            protocol=PROTOCOL,
            instance=self.identity,
            incarnation=self.incarnation,
            role="generation",
            reply=reply,
            fingerprint={} if memory else self.fingerprint,
            descriptor=self.agent.local_descriptor() if memory else None,
            layout=to_wire(self.manager.layout) if memory else None,
        )
        return replace_message(hello, **changes)

    def greet(self, endpoint: str) -> Address:
        """The whole handshake, as the one who calls."""
        address = self.channel.connect(endpoint)
        self.send(address, self.hello(reply=False))
        self.expect(Hello)
        self.send(address, self.hello(reply=False, memory=True))
        _, answer = self.expect(Hello)
        assert answer.descriptor is not None
        return address

    def answer_greeting(self) -> Address:
        """The whole handshake, as the one who is called."""
        address, _ = self.expect(Hello)
        self.send(address, self.hello(reply=True))
        _, memory = self.expect(Hello)
        assert memory.descriptor is not None
        self.send(address, self.hello(reply=True, memory=True))
        return address

    def table(self, params: DisaggregatedParams, blocks: Any = range(8), **changes: Any) -> Table:
        """A TABLE that a context worker accepts, but for the changes."""
        import msgspec

        state = msgspec.msgpack.decode(params.opaque_state, type=OpaqueState)
        ids = np.array(list(blocks), dtype="<i4")
        table = Table(
            key=Key(state.instance, state.incarnation, state.request, 0),
            token=state.token,
            prompt_digest=state.prompt_digest,
            prompt_tokens=len(PROMPT),
            start_tokens=0,
            blocks=[ids.tobytes()],
            nbytes=len(PROMPT) * TOKEN_BYTES,
        )
        return replace_message(table, **changes)

    def params(self, request: TransferRequest, **changes: Any) -> DisaggregatedParams:
        """What this context worker would answer for a request."""
        state = OpaqueState(
            version=STATE_VERSION,
            instance=self.identity,
            incarnation=self.incarnation,
            request=request.request_id,
            token=b"t" * 16,
            prompt_digest=prompt_digest(request.prompt_token_ids),
        )
        return DisaggregatedParams(
            "generation_only",
            ctx_request_id=request.request_id,
            opaque_state=pack_state(state),
            ctx_info_endpoint=self.channel.endpoint,
            **changes,
        )


def replace_message(message: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(message, **changes)


@pytest.fixture
def raw_peer() -> Iterator[Callable[..., RawPeer]]:
    """A raw peer of a worker: same hub, same fingerprint."""
    peers: list[RawPeer] = []

    def make(worker: Worker, identity: str = "raw-peer", **fingerprint: Any) -> RawPeer:
        hub: ScriptedHub = worker.agent._hub
        fields = {**worker.transceiver._shared.fingerprint.fields, **fingerprint}
        peers.append(RawPeer(ScriptedAgent(identity, hub=hub), fields, identity))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.fixture
def kit() -> Any:
    """The helpers above, since test modules cannot import one another."""
    import types

    return types.SimpleNamespace(
        PROMPT=PROMPT,
        PROMPT_BYTES=len(PROMPT) * TOKEN_BYTES,
        TOKEN_BYTES=TOKEN_BYTES,
        wait_until=wait_until,
        set_clocks=set_clocks,
        counters=counters,
        ledger_blocks=ledger_blocks,
        receive_state=receive_state,
        send_state=send_state,
        replace=replace_message,
    )


@pytest.fixture
def fetch(kit: Any) -> Callable[..., TransferRequest]:
    """Prefill ``request_id`` here, give it blocks there under ``other_id``, and start both sides."""

    def start(
        pair: WorkerPair, request_id: int = 1, other_id: int = 11, prompt: tuple[int, ...] = PROMPT, **how: Any
    ) -> TransferRequest:
        request = pair.prefill(request_id, prompt)
        if how.pop("respond", True):
            pair.context.transceiver.respond_and_send_async(request)
        received = replace(pair.admit(request, other_id), **how)
        pair.generation.transceiver.request_and_receive_async(received)
        return received

    return start
