"""The abstract transceiver and the abstract transfer agent."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from kvferry_plugins.layout import Addresses, BlockIds, PoolCopy
from kvferry_plugins.types import DisaggregatedParams, TransferRequest, TransferStatus

RegistrationId = NewType("RegistrationId", int)
PeerId = NewType("PeerId", int)
TransferId = NewType("TransferId", int)


class Fence(enum.Enum):
    """What an agent can say of a writer."""

    FENCED = "fenced"
    """That peer will never write here again."""
    IN_DOUBT = "in doubt"
    """It might: the blocks it was told to write stay quarantined."""


class Capability(enum.Enum):
    """What a transceiver can do beyond handing over one finished prefill."""

    PIPELINING = "pipelining"
    GENERATION_FIRST = "generation-first"
    IN_FLIGHT_CANCELLATION = "in-flight cancellation"
    CHECKSUM = "checksum"
    TIMING = "timing"


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that peers may write to, or that we write from."""

    address: int
    nbytes: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one submitted transfer; ``ok`` only after *remote* completion."""

    id: TransferId
    ok: bool
    error: str | None = None


class TransferAgent(ABC):
    """One-sided writes into a peer's registered memory. One thread calls all of it; nothing blocks."""

    library: str = ""
    """The transport's library and version, as compared in the handshake: ``nixl 1.5.1``."""

    wraps: "TransferAgent | Sequence[TransferAgent] | None" = None
    """What this agent hands its calls on to; None = whatever agents its attributes hold. See ``forwarding``."""

    @property
    def unusable(self) -> str | None:
        """Why no peer can be reached any more, and what to do; None while one may be. From any thread, never blocks."""
        return None

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> RegistrationId:
        """Make memory reachable; before ``local_descriptor`` is asked."""

    @abstractmethod
    def deregister(self, registration: RegistrationId) -> None:
        """Undo ``register``. This revokes nothing that a peer has already posted."""

    @abstractmethod
    def local_descriptor(self) -> bytes:
        """What a peer needs to ``connect``: opaque, at most 1 MiB."""

    @abstractmethod
    def connect(self, descriptor: bytes) -> PeerId:
        """Learn a peer. Raises TransferError for a descriptor that is not one of ours."""

    @abstractmethod
    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer; its transfers in flight complete with an error or not at all."""

    @abstractmethod
    def submit(self, peer: PeerId, src: Addresses, dst: Addresses, nbytes: Addresses) -> TransferId:
        """Post ``nbytes[i]`` bytes from our ``src[i]`` to the peer's ``dst[i]``, for all i.

        Never blocks. Raising means that nothing was posted.

        Raises:
            TransferError: the transport refused.
        """

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Make progress, as writer and as target; never block. Each submitted transfer is reported once."""

    def route(self, peer: PeerId) -> str:
        """How writes to a peer go, for people: the library, or what is faster and possible with this peer."""
        return self.library

    def set_active(self, active: bool) -> None:  # noqa: B027 -- optional: most agents progress by ``poll`` alone
        """Hear that a peer may write here from now on (its POSTING), or that none does any more (the last DONE)."""

    @abstractmethod
    def wakeup_fd(self) -> int | None:
        """One descriptor that turns readable when ``poll`` has work, or None: then it is polled while work is known."""

    @abstractmethod
    def fence(self, peer: PeerId) -> Fence:
        """Whether that peer can still write here. Never blocks; ask again for as long as it says IN_DOUBT."""

    @abstractmethod
    def close(self) -> None:
        """Stop and release everything; idempotent.

        Afterwards ``poll`` gives nothing, ``deregister`` and ``disconnect`` do nothing, and what needs the transport
        raises TransferError.
        """


class BlockTransferAgent(TransferAgent):
    """A transfer agent that takes whole block lists, and plans and posts them without the interpreter's lock.

    What the ``CPP`` runtime drives.
    """

    @abstractmethod
    def block_map(self, copy: PoolCopy) -> object:
        """Prepare ``submit_blocks`` between two pools; the value is the agent's own.

        Raises:
            TransferError: a run of bytes leaves its block.
        """

    @abstractmethod
    def submit_blocks(self, peer: PeerId, block_map: object, src: BlockIds, dst: BlockIds) -> TransferId:
        """Write what the map says of our block ``src[i]`` to the peer's ``dst[i]``; raising = nothing was posted.

        Never blocks.

        Args:
            peer: as ``connect`` gave it.
            block_map: from ``block_map``.
            src: int32[n].
            dst: int32[n]; −1 = the peer does not want this block.

        Raises:
            TransferError: the map leaves registered memory, or the transport refused.
        """

    @abstractmethod
    def cancel(self, transfer: TransferId, reason: str = "cancelled") -> bool:
        """Post nothing more of it; its completion comes once nothing is in flight. False: it is over already."""

    @abstractmethod
    def progress_bytes(self, transfer: TransferId) -> int | None:
        """Bytes of a transfer that are complete at the peer by now; None if it is over."""


class KvCacheTransceiver(ABC):
    """Moves a request's KV blocks from the context worker to the generation worker.

    A status lists request ids, each once ever.
    """

    kv_transfer_timeout_ms: int | None
    """The transfer clock, from POSTING; None = only the peer's liveness bounds it."""

    @property
    def unusable(self) -> str | None:
        """Why no request can be moved any more, and what to do; None = none is known. From any thread, never blocks."""
        return None

    def stalled(self, seconds: float) -> str | None:
        """Say in what its own thread hangs, if it has work and has not moved for so long; None = it moves, or has none.

        From any thread, never blocks.
        """
        return None

    memory_in_use: str | None = None
    """Why the manager's memory must not be freed although ``shutdown`` has returned; None = it may be."""

    wraps: "KvCacheTransceiver | Sequence[KvCacheTransceiver] | None" = None
    """What this one hands its calls on to; None = whatever transceivers its attributes hold. See ``forwarding``."""

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[Capability]:
        """What this transceiver can do."""

    @abstractmethod
    def prepare_context_requests(self, requests: Sequence[TransferRequest]) -> None:
        """Announce requests before their prefill, so that a TABLE that comes first finds them."""

    @abstractmethod
    def respond_and_send_async(
        self, request: TransferRequest, computed_tokens: int | None = None, last: bool = True
    ) -> None:
        """Context: the KV of the first ``computed_tokens`` tokens (None = all of the prompt) is complete; send it.

        Never blocks; the outcome comes by ``check_context_transfer_status``.
        """

    @abstractmethod
    def request_and_receive_async(self, request: TransferRequest) -> None:
        """Generation: fetch the prompt's KV into the blocks that the manager gave the request. Never blocks.

        Raises:
            TransferError: ``request.params`` name an endpoint that is not a configured peer, or cannot be read;
                nothing was sent.
        """

    @abstractmethod
    def request_and_receive_sync(self, request: TransferRequest) -> None:
        """Like ``request_and_receive_async``, but wait for the outcome and raise what went wrong."""

    @abstractmethod
    def check_context_transfer_status(self, at_least: int = 0) -> TransferStatus:
        """Outcomes of sends since the last call; waits for ``at_least`` of them, at most one poll interval."""

    @abstractmethod
    def check_gen_transfer_status(self, at_least: int = 0) -> TransferStatus:
        """Outcomes of receives since the last call; waits for ``at_least`` of them, at most one poll interval."""

    @abstractmethod
    def check_gen_transfer_complete(self) -> bool:
        """Whether no receive is in flight."""

    @abstractmethod
    def has_inflight_transfer(self, request: TransferRequest) -> bool:
        """Whether the request has a session that is not final."""

    @abstractmethod
    def cancel_request(self, request: TransferRequest, reason: str = "") -> bool:
        """Cancel, at the peer too, which a context worker tells why.

        Returns:
            True: the blocks may be freed now; False: a write is in flight, ask again.
        """

    @abstractmethod
    def commit_blocks_for_reuse(self, request: TransferRequest) -> None:
        """Generation: commit the full blocks that were received, so that the next request fetches only the rest."""

    @abstractmethod
    def get_disaggregated_params(self, request: TransferRequest) -> DisaggregatedParams:
        """Context: what the generation worker needs to fetch this request."""

    @abstractmethod
    def status_dump(self) -> dict[str, object]:
        """Sessions, ledger, peers and counters, as plain JSON values; answers even if the loop hangs."""

    @abstractmethod
    def shutdown(self) -> None:
        """End sessions, connections and the loop; idempotent."""
