"""The transceiver that both runtimes are: one protocol, one loop thread; they differ in who moves the bytes."""

import copy
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from kvferry.forks import Guarded, guard, released, require_no_parent
from kvferry.transceiver.assembly import open_shared
from kvferry.transceiver.chunks import newly_complete, no_blocks
from kvferry.transceiver.ledger import Owner
from kvferry.transceiver.loop import Loop
from kvferry.transceiver.overlap import wanted_ordinals
from kvferry.transceiver.params import STATE_VERSION, HandoffSource, OpaqueState, pack_state, prompt_digest, read_source
from kvferry.transceiver.receives import Receive
from kvferry.transceiver.sends import Send
from kvferry.transceiver.wire import MAX_AUX_BYTES, PROTOCOL, Key
from kvferry.transceiver.world import TOKEN_BYTES, World
from kvferry.transceiver.writers import Writer
from kvferry_plugins.errors import ConfigError, PeerLostError, TransferError
from kvferry_plugins.layout import BlockIds
from kvferry_plugins.transceiver import Capability, KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import (
    DisaggregatedParams,
    Role,
    ScheduleStyle,
    TransceiverSpec,
    TransferRequest,
    TransferStatus,
)

logger = logging.getLogger("kvferry.transceiver")

SHUTDOWN_SECONDS = 5.0
"""How long ``shutdown`` waits for posted writes, and for peers to say that they stopped."""


class SessionTransceiver(KvCacheTransceiver):
    """One protocol, one loop thread.

    Args:
        spec: what to build from.
        options: for the agent, beyond those that every runtime gives.
        make_writer: how blocks become writes that the agent posts.

    Raises (on construction):
        ConfigError: the control socket cannot be bound, or the configuration asks for what this runtime cannot do.
        BackendUnavailableError: from the agent's maker, or from ``make_writer``.
        HandshakeError: a rank of this instance is missing, there twice, or of another kind; the same on every rank.
        ForkedProcessError: this process is a fork of one that has a transceiver.
    """

    def __init__(
        self,
        spec: TransceiverSpec,
        make_writer: Callable[[TransferAgent], Writer],
        options: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        require_no_parent()
        self.kv_transfer_timeout_ms: int | None = spec.config.get("kv_transfer_timeout_ms", 60_000)
        self._spec = spec
        self._manager = spec.manager
        if spec.config.get("kv_transfer_checksum") and spec.device != "cpu":
            raise ConfigError(
                "kv_transfer_checksum reads host memory: use it with device cpu, or turn it off",
                setting="cache_transceiver_config.kv_transfer_checksum",
            )
        self._sends: dict[int, Send] = {}
        """Tokens and digests of live context requests, for ``get_disaggregated_params``; the engine's thread's."""
        self._attempts: dict[tuple[str, int, int], int] = {}
        self._closed = False
        self.memory_in_use: str | None = "its transceiver is not shut down"
        self._entering = threading.Lock()
        """Held while a request enters, so that shutdown finds it entered or refuses it."""
        self._shared, self._registration = open_shared(spec, make_writer, options)
        guard(self._shared.agent, Guarded("transfer agent", spec.runtime, spec.backend))
        guard(self, Guarded("transceiver", spec.runtime, spec.backend))
        self._loop = Loop(self._shared, spec.ranks)
        self._loop.start()
        try:
            self._loop.ranks.wait()
        except BaseException:
            self.shutdown()
            raise

    # --- both sides ----------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """Where the control socket listens, as peers reach it."""
        return self._shared.channel.endpoint

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset(Capability)

    @property
    def unusable(self) -> str | None:
        lost = self._loop.ranks.lost
        return str(lost) if lost is not None else self._shared.agent.unusable

    def stalled(self, seconds: float) -> str | None:
        return self._loop.pulse.stalled(seconds)

    def has_inflight_transfer(self, request: TransferRequest) -> bool:
        return any(request.request_id in outcomes.pending for outcomes in self._shared.outcomes.values())

    def cancel_request(self, request: TransferRequest, reason: str = "") -> bool:
        side = self._loop.context if self._spec.role is Role.CONTEXT else self._loop.generation
        self._loop.ask(lambda: side.cancel(request.request_id, reason), self._shared.clocks.poll_interval)
        return not self._shared.ledger.holds(request.request_id)

    def status_dump(self) -> dict[str, object]:
        shared = self._shared
        return {
            "instance": shared.instance,
            "role": shared.role.value,
            "endpoint": shared.channel.endpoint,
            "trusted_peers": [peer.endpoint for peer in self._spec.peers],
            "fingerprint": {
                "protocol": list(PROTOCOL),
                "fields": dict(shared.fingerprint.fields),
                "locked": shared.fingerprint.locked,
            },
            "loop_alive": self._loop.alive,
            "progress": self._loop.pulse.dump(),
            "ready": not self._closed and self._loop.ranks.lost is None,
            "ranks": self._loop.ranks.dump(),
            "verdicts": self._loop.council.dump(),
            "unusable": self.unusable,
            "memory_in_use": self.memory_in_use if self._closed else None,
            "sends": self._loop.context.dump(),
            "held_tables": self._loop.context.held_tables,
            "receives": self._loop.generation.dump(),
            "ledger": shared.ledger.dump(),
            "peers": self._loop.links.dump(),
            "handshakes": self._loop.links.handshakes.dump(),
            "counters": dict(shared.counters),
            "outcomes": {role.value: dict(outcomes.totals) for role, outcomes in shared.outcomes.items()},
        }

    @property
    def drained(self) -> bool:
        """Whether the ledger is empty and nothing is under way."""
        return self._shared.ledger.empty and not any(o.pending for o in self._shared.outcomes.values())

    def shutdown(self) -> None:
        with self._entering:
            if self._closed:
                return
            self._closed = True
        error = PeerLostError("this worker is shutting down")
        self._loop.call(self._loop.ranks.leave)
        self._loop.call(lambda: self._loop.context.shutdown(error))
        self._loop.call(self._loop.council.shutdown)
        self._loop.ask(lambda: self._loop.generation.shutdown(error), SHUTDOWN_SECONDS)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while not self._shared.ledger.empty and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._loop.stop(SHUTDOWN_SECONDS):
            self.memory_in_use = f"the transfer loop did not stop within {SHUTDOWN_SECONDS:g} s; its agent is left open"
            logger.error("%s", self.memory_in_use)
            return
        if self._shared.ledger.empty:
            self._shared.agent.deregister(self._registration)
        else:  # what is posted may still need the registration, which ends with the agent
            logger.error("shut down with blocks in flight: %s", self._shared.ledger.dump())
        self._shared.agent.close()
        self.memory_in_use = self._memory_left_in_use()
        self._shared.channel.close()
        released(self._shared.agent)
        released(self)

    def _memory_left_in_use(self) -> str | None:
        """Our agent reads and writes nothing any more; a peer's may."""
        blocks = sum(entry.blocks for entry in self._shared.ledger.entries() if entry.owner is not Owner.SOURCE)
        return f"a peer may still write to {blocks} blocks" if blocks else None

    # --- context -------------------------------------------------------------------------------------------------

    def prepare_context_requests(self, requests: Sequence[TransferRequest]) -> None:
        with self._entering:
            for request in requests:
                self._admit(request)

    def _admit(self, request: TransferRequest) -> Send:
        self._require_open()
        send = self._sends.get(request.request_id)
        if send is None:
            self._require_usable()
            self._shared.outcomes[Role.CONTEXT].expect(request.request_id)
            digest = prompt_digest(request.prompt_token_ids)
            send = Send(
                request_id=request.request_id,
                token=self._token(request.request_id, digest),
                prompt_digest=digest,
                prompt_tokens=len(request.prompt_token_ids),
                started=self._shared.now(),
                tables=no_blocks(self._shared.layout, len(request.prompt_token_ids)),
            )
            self._sends[request.request_id] = send
            admitted = send
            self._loop.call(lambda: self._loop.context.admit(admitted))
        return send

    def respond_and_send_async(
        self, request: TransferRequest, computed_tokens: int | None = None, last: bool = True
    ) -> None:
        computed = len(request.prompt_token_ids) if computed_tokens is None else computed_tokens
        if last != (computed >= len(request.prompt_token_ids)):
            raise ValueError(f"{computed} of {len(request.prompt_token_ids)} tokens cannot be last={last}")
        if len(request.aux) > MAX_AUX_BYTES:
            raise ValueError(f"aux is {len(request.aux)} bytes, at most {MAX_AUX_BYTES} travel with a request")
        request_id, present = request.request_id, self._manager.block_table(request.request_id)
        with self._entering:
            send = self._admit(request)
            chunk = newly_complete(self._shared.layout, present, send, computed)
            entry = self._shared.ledger.hold(
                request_id, Owner.SOURCE, chunk.tables, freed_by="acknowledgement, or the end of its lease"
            )
            send.offered_tokens = max(send.offered_tokens, computed)
            self._loop.call(lambda: self._loop.context.respond(request_id, chunk, entry, request.aux))

    def check_context_transfer_status(self, at_least: int = 0) -> TransferStatus:
        status = self._shared.outcomes[Role.CONTEXT].take(at_least, self._shared.clocks.poll_interval)
        for request_id in (*status.completed, *status.failed, *status.cancelled):
            self._sends.pop(request_id, None)
        return status

    def get_disaggregated_params(self, request: TransferRequest) -> DisaggregatedParams:
        with self._entering:
            send = self._admit(request)
        instance, incarnation = self._world.name
        state = OpaqueState(
            version=STATE_VERSION,
            instance=instance,
            incarnation=incarnation,
            request=request.request_id,
            token=send.token,
            prompt_digest=send.prompt_digest,
        )
        return DisaggregatedParams(
            request_type="generation_only",
            ctx_request_id=request.request_id,
            disagg_request_id=request.request_id,
            opaque_state=pack_state(state),
            ctx_info_endpoint=self._world.first.endpoint,
        )

    # --- generation ----------------------------------------------------------------------------------------------

    def request_and_receive_async(self, request: TransferRequest) -> None:
        self._receive(request, reserved=False)

    def _receive(self, request: TransferRequest, *, reserved: bool) -> None:
        """Start a receive. ``reserved``: its outcome is for ``request_and_receive_sync``, not for a status."""
        source = read_source(request.params, request.prompt_token_ids)
        self._shared.channel.require_trusted(source.endpoint)
        tables = self._wanted_tables(request)
        with self._entering:
            self._require_open()
            self._require_usable()
            self._shared.outcomes[Role.GENERATION].expect(request.request_id, reserved=reserved)
            try:
                receive = self._make_receive(request, source, tables)
            except BaseException:
                self._shared.outcomes[Role.GENERATION].forget(request.request_id)
                raise
            self._loop.call(lambda: self._loop.generation.start(receive))

    def _make_receive(self, request: TransferRequest, source: HandoffSource, tables: tuple[BlockIds, ...]) -> Receive:
        if self._shared.ledger.awaits_writes(request.request_id, tables):
            raise TransferError(
                f"a former attempt may still write to the blocks of request {request.request_id}: "
                "free them and allocate others, or wait until cancel_request says True",
                request_id=request.request_id,
            )
        assert request.params is not None
        return Receive(
            request_id=request.request_id,
            key=self._next_attempt(source.state, request.attempt),
            source=source,
            tables=tables,
            entry=self._shared.ledger.hold(
                request.request_id, Owner.DESTINATION, tables, freed_by="DONE, or the writer's word that nothing comes"
            ),
            start_tokens=request.cached_tokens,
            prompt_tokens=len(request.prompt_token_ids),
            may_precede_request=request.params.schedule_style is ScheduleStyle.GENERATION_FIRST,
            started=self._shared.now(),
        )

    def _next_attempt(self, state: OpaqueState, at_least: int) -> Key:
        """The same context request fetched again is a new attempt, whatever the engine calls it."""
        name = (state.instance, state.incarnation, state.request)
        attempt = max(at_least, self._attempts.get(name, -1) + 1)
        self._attempts[name] = attempt
        while len(self._attempts) > 65_536:
            del self._attempts[next(iter(self._attempts))]
        return Key(state.instance, state.incarnation, state.request, attempt)

    def request_and_receive_sync(self, request: TransferRequest) -> None:
        self._receive(request, reserved=True)
        # the session has a clock for each of its states, so an outcome always comes while the loop lives
        outcomes = self._shared.outcomes[Role.GENERATION]
        event = None
        while event is None and self._loop.alive:
            event = outcomes.wait_for(request.request_id, self._shared.clocks.poll_interval)
        event = event or outcomes.wait_for(request.request_id, 0)
        if event is None:
            raise TransferError("the transfer loop ended", request_id=request.request_id)
        if event.error is not None:
            raise event.error

    def check_gen_transfer_status(self, at_least: int = 0) -> TransferStatus:
        return self._shared.outcomes[Role.GENERATION].take(at_least, self._shared.clocks.poll_interval)

    def check_gen_transfer_complete(self) -> bool:
        return not self._shared.outcomes[Role.GENERATION].pending

    def commit_blocks_for_reuse(self, request: TransferRequest) -> None:
        self._manager.commit(request.request_id, request.prompt_token_ids)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _wanted_tables(self, request: TransferRequest) -> tuple[BlockIds, ...]:
        """The request's blocks of the prompt from its first missing token on, one array a group."""
        prompt, cached = len(request.prompt_token_ids), request.cached_tokens
        tables = []
        for group, table in zip(self._shared.layout.groups, self._manager.block_table(request.request_id), strict=True):
            ordinals = wanted_ordinals(group, prompt, cached)
            if len(table) < ordinals.stop:
                what = f"{len(table)} blocks, its prompt needs {ordinals.stop}"
                raise ValueError(f"request {request.request_id} has {what}")
            tables.append(np.ascontiguousarray(table[ordinals.start : ordinals.stop]))
        return tuple(tables)

    @property
    def _world(self) -> World:
        """All ranks of this instance, which were waited for."""
        assert self._shared.world is not None
        return self._shared.world

    def _token(self, request_id: int, digest: bytes) -> bytes:
        """A request's token: drawn, or what every rank can tell."""
        return secrets.token_bytes(TOKEN_BYTES) if self._world.alone else self._world.token(request_id, digest)

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError("this transceiver is shut down")
        if self._loop.ranks.lost is not None:
            raise copy.copy(self._loop.ranks.lost)

    def _require_usable(self) -> None:
        """Refuse what is new; what is under way comes to its own end."""
        if (reason := self.unusable) is not None:
            raise PeerLostError(f"this worker takes no new request: {reason}")
