"""A request's life as a generator of steps, one kind a function; whichever way it ends, its blocks go back.

A step is a chunk of prefill or one token. A generator yields ``Turn.NEXT`` to let others have a turn, and
``Turn.TRANSFER`` to sleep until its transfer has ended, whose event is sent to it. Closing it cancels the request.
"""

import enum
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from kvferry.integrations.transformers.engine import FinishReason, GenerationRequest, PagedEngine, RunningRequest
from kvferry.transceiver.params import unpack_state, with_sampler
from kvferry_plugins.errors import TransferError
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import DisaggregatedParams, TransferEvent, TransferRequest


class Turn(enum.Enum):
    """What a step waits for."""

    NEXT = "next"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class Handoff:
    """A received hand-off, in figures."""

    nbytes: int
    blocks: int
    cached_tokens: int
    """Prompt tokens whose KV was here already and did not travel."""
    admission_seconds: float
    transfer_seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    """The first token is there; nothing can go wrong any more that a status could tell."""

    cached_tokens: int
    handoff: Handoff | None = None
    params: DisaggregatedParams | None = None
    """Context: what to pass on."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One token of the output."""

    token: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The output is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The request came to nothing, or stopped half-way."""

    error: BaseException


News = Started | Generated | Ended | Failed
Steps = Generator[Turn, TransferEvent | None, None]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request on its way through the engine."""

    request: GenerationRequest
    params: DisaggregatedParams
    tell: Callable[[News], None]
    """Called on the engine's thread; must not block."""

    @property
    def request_id(self) -> int:
        """The key of its blocks."""
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class Jobs:
    """Starts jobs on one engine and one transceiver."""

    engine: PagedEngine
    transceiver: KvCacheTransceiver

    def steps(self, job: Job) -> Steps:
        """The steps of a job, not begun yet."""
        match job.params.request_type:
            case "context_only":
                return self._context(job)
            case "generation_only":
                return self._generation(job)
            case _:
                return self._aggregated(job)

    def _aggregated(self, job: Job) -> Steps:
        running = self.engine.start(job.request)
        try:
            yield from self._prefill(running)
            job.tell(Started(running.cached_tokens))
            yield from self._decode(job, running)
        finally:
            self.engine.finish(running)

    def _context(self, job: Job) -> Steps:
        """Prefill, offer the hand-off, and keep the blocks until it has ended."""
        running = self.engine.start(job.request)
        try:
            yield from self._prefill(running)
            first = running.output_token_ids[0]
            if running.finish_reason == "stop":
                # a router goes no further, and there is nothing to decode: no hand-off that nobody would fetch
                params = DisaggregatedParams("context_only", (first,), ctx_request_id=job.request_id)
                self._tell_first(job, running, params, "stop")
                return
            transfer = TransferRequest(job.request_id, job.request.prompt_token_ids)
            self.transceiver.respond_and_send_async(transfer)
            try:
                self._tell_first(job, running, self._params(job, transfer, first), "length")
                yield Turn.TRANSFER
            except BaseException:
                self.transceiver.cancel_request(transfer)
                raise
        finally:
            self.engine.finish(running)

    def _params(self, job: Job, transfer: TransferRequest, first: int) -> DisaggregatedParams:
        params = replace(self.transceiver.get_disaggregated_params(transfer), first_gen_tokens=(first,))
        sampled = job.request.sampling.temperature > 0
        return with_sampler(params, job.request.sampling.seed if sampled else None, counter=1)

    def _tell_first(self, job: Job, running: RunningRequest, params: DisaggregatedParams, reason: FinishReason) -> None:
        job.tell(Started(running.cached_tokens, params=params))
        job.tell(Generated(running.output_token_ids[0]))
        job.tell(Ended(reason))

    def _generation(self, job: Job) -> Steps:
        """Fetch what is not here yet, then decode; a hand-off is concluded even where nothing is left to decode."""
        (first,) = job.params.first_gen_tokens
        if job.params.opaque_state is None:
            self._require_over(job, first)
            job.tell(Started(0))
            job.tell(Generated(first))
            job.tell(Ended("stop"))
            return
        request = _with_travelled_seed(job)
        prompt = request.prompt_token_ids
        self.engine.validate(request)
        cached = self.engine.manager.allocate(job.request_id, len(prompt), prompt)
        try:
            event = yield from self._fetch(TransferRequest(job.request_id, prompt, cached, params=job.params))
            running = self.engine.adopt(request, first)
        except BaseException:
            self.engine.manager.free(job.request_id)
            raise
        try:
            job.tell(Started(cached, _handoff(event, cached)))
            yield from self._decode(job, running)
        finally:
            self.engine.finish(running)

    def _require_over(self, job: Job, first: int) -> None:
        """A context worker offers no hand-off only where its first token ended the output."""
        if job.request.ignore_stop or first not in self.engine.loaded.stop_token_ids:
            unpack_state(None)  # raises

    def _fetch(self, transfer: TransferRequest) -> Generator[Turn, TransferEvent | None, TransferEvent]:
        self.transceiver.request_and_receive_async(transfer)
        try:
            event = yield Turn.TRANSFER
        except BaseException:
            self.transceiver.cancel_request(transfer)
            raise
        assert event is not None
        if event.error is not None:
            raise event.error
        if event.outcome != "completed":
            raise TransferError(f"request {transfer.request_id} {event.outcome}", request_id=transfer.request_id)
        self.transceiver.commit_blocks_for_reuse(transfer)
        return event

    def _prefill(self, running: RunningRequest) -> Steps:
        while not running.prefilled:
            self.engine.prefill_step(running)
            yield Turn.NEXT

    def _decode(self, job: Job, running: RunningRequest) -> Steps:
        job.tell(Generated(running.output_token_ids[-1]))
        while running.finish_reason is None:
            yield Turn.NEXT
            job.tell(Generated(self.engine.decode_step(running)))
        job.tell(Ended(running.finish_reason))


def _with_travelled_seed(job: Job) -> GenerationRequest:
    """Sample on as the context worker began, whatever this request says of its seed."""
    state = unpack_state(job.params.opaque_state)
    if state.counter != 1:
        raise TransferError(f"opaque_state counts {state.counter} sampled tokens, not 1", field="opaque_state")
    if state.seed is None:
        return job.request
    return replace(job.request, sampling=replace(job.request.sampling, seed=state.seed))


def _handoff(event: TransferEvent, cached: int) -> Handoff:
    return Handoff(event.nbytes, event.blocks, cached, event.admission_seconds, event.transfer_seconds)
