"""How a receive ends, and how long its blocks stay in quarantine: until each of its writers is done, or gone."""

from kvferry.transceiver.council import Council
from kvferry.transceiver.links import Links, LinkState
from kvferry.transceiver.receives import Part, Receive, ReceiveState
from kvferry.transceiver.shared import Shared
from kvferry.transceiver.wire import Cancel, Key
from kvferry_plugins.errors import KvferryError
from kvferry_plugins.types import Role, TransferEvent


class ReceiveEnds:
    """Ends the receives of one transceiver; the two tables hold those whose writers are not done."""

    def __init__(
        self,
        shared: Shared,
        links: Links,
        council: Council,
        receives: dict[Key, Receive],
        by_request: dict[int, Receive],
    ) -> None:
        self._shared = shared
        self._links = links
        self._council = council
        self._receives = receives
        self._by_request = by_request

    def complete(self, receive: Receive) -> None:
        """Every byte is here, and was acknowledged as such."""
        receive.end = ReceiveState.COMPLETED
        self._release(receive, ReceiveState.COMPLETED.value)
        self._council.report(receive, self._event(receive, None))

    def settle(self, receive: Receive, state: ReceiveState, error: KvferryError | None) -> None:
        """Make an outcome final; the blocks go back now, or into quarantine while somebody may write to them."""
        receive.end = state
        for part in receive.parts.values():
            part.writer_done = part.writer_done or part.state is ReceiveState.CONNECTING
        if receive.quiet:
            self._release(receive, state.value)
        else:
            self._shared.ledger.quarantine(receive.entry, freed_by="CANCELLED, or the end of the writer's process")
            self._shared.counters["quarantined_receives"] += 1
        for part in receive.parts.values():
            if not part.writer_done or part.state is ReceiveState.COMPLETED:  # it may still serve other ranks of ours
                self.ask_to_stop(receive, part)
        self._council.report(receive, self._event(receive, error))

    def writer_is_done(self, receive: Receive, part: Part, reason: str) -> None:
        """One of the writers of a receive that is over will write no more."""
        part.writer_done = True
        if receive.quiet:
            self._release(receive, reason)

    def _release(self, receive: Receive, reason: str) -> None:
        self._shared.ledger.release(receive.entry, reason=reason)
        self._receives.pop(receive.key, None)
        if self._by_request.get(receive.request_id) is receive:
            del self._by_request[receive.request_id]

    def _event(self, receive: Receive, error: KvferryError | None) -> TransferEvent:
        aux = next((aux for _, aux in sorted(receive.aux.items()) if aux), b"")
        return self._shared.event(
            receive.request_id,
            Role.GENERATION,
            receive.outcome,
            peer=receive.key.instance,
            nbytes=receive.received,
            blocks=receive.blocks,
            started=receive.started,
            posted=receive.posted,
            error=error,
            aux=aux if receive.end is ReceiveState.COMPLETED else b"",
            arrivals=tuple(receive.arrivals),
        )

    def pursue(self, receive: Receive, part: Part) -> None:
        """Ask again whether anything is posted; over a new connection if the old one broke."""
        if self._links.is_gone(*part.name):
            self.writer_is_done(receive, part, "writer gone")
            return
        part.next_cancel = self._shared.now() + self._shared.clocks.ping
        try:
            part.link = self._links.open(part.endpoint)
        except KvferryError:
            return
        if part.link.state is LinkState.READY:
            self.ask_to_stop(receive, part)

    def ask_to_stop(self, receive: Receive, part: Part) -> None:
        """Send CANCEL to the life that may be writing; another life's word would prove nothing."""
        link = part.link
        if link is not None and (link.instance, link.incarnation) == part.name:
            part.next_cancel = self._shared.now() + self._shared.clocks.ping
            self._shared.send(link.address, Cancel(key=receive.key, failed=receive.failed_there))
