"""A generation worker's part: fetch what is not here yet, and decode."""

from collections.abc import Generator
from dataclasses import dataclass, replace

from kvferry.integrations.transformers.engine import GenerationRequest, PagedEngine
from kvferry.serving.first_token import unpack_first_token
from kvferry.serving.steps import Ended, Generated, Handoff, Job, Started, Steps, Turn, decoded
from kvferry.transceiver.params import unpack_state
from kvferry_plugins.errors import TransferError
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import TransferEvent, TransferRequest


@dataclass(frozen=True, slots=True)
class GenerationSteps:
    """Makes the steps of ``generation_only`` requests.

    Generation-first, the blocks are asked for while the context worker still computes, and the first token is known
    when they are complete.
    """

    engine: PagedEngine
    transceiver: KvCacheTransceiver

    def steps(self, job: Job) -> Steps:
        """The steps of one request; a hand-off is concluded even where nothing is left to decode."""
        job.timeline.begin()
        if job.params.opaque_state is None:
            self._tell_over(job)
            return
        request = _with_travelled_seed(job)
        prompt = request.prompt_token_ids
        self.engine.validate(request)
        cached = self.engine.manager.allocate(job.request_id, len(prompt), prompt, history_tokens=len(prompt))
        try:
            event = yield from self._fetch(TransferRequest(job.request_id, prompt, cached, params=job.params))
            job.timeline.fetched(event)
            running = self.engine.adopt(request, _first_token(job, event))
            job.timeline.attached(event)
        except BaseException:
            self.engine.manager.free(job.request_id)
            raise
        try:
            job.tell(Started(cached, _handoff(event, cached)))
            yield from decoded(self.engine, job, running)
        finally:
            self.engine.finish(running)

    def _tell_over(self, job: Job) -> None:
        """A context worker offers no hand-off only where its first token ended the output."""
        first = next(iter(job.params.first_gen_tokens), None)
        if first is None or job.request.ignore_stop or first not in self.engine.loaded.stop_token_ids:
            unpack_state(None)  # raises
        assert first is not None
        job.tell(Started(0))
        job.tell(Generated(first))
        job.tell(Ended("stop"))

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


def _first_token(job: Job, event: TransferEvent) -> int:
    """What the context worker sent along; where the parameters name it too, it is the same."""
    named = job.params.first_gen_tokens
    if named and not event.aux:  # a plugin's transceiver that carries no more than it has to
        return named[0]
    first = unpack_first_token(event.aux).token
    if named not in ((), (first,)):
        raise _another_first_token(job, named[0])
    return first


def _with_travelled_seed(job: Job) -> GenerationRequest:
    """Sample on as the context worker began, whatever this request says of its seed."""
    state = unpack_state(job.params.opaque_state)
    if state.counter != 1:
        raise TransferError(f"opaque_state counts {state.counter} sampled tokens, not 1", field="opaque_state")
    named = job.params.first_gen_tokens
    if state.first_token is not None and named != (state.first_token,):
        raise _another_first_token(job, *named)
    if state.seed is None:
        return job.request
    return replace(job.request, sampling=replace(job.request.sampling, seed=state.seed))


def _another_first_token(job: Job, *named: int) -> TransferError:
    return TransferError(
        f"first_gen_tokens is {list(named)}, but request {job.params.ctx_request_id} began with another token: "
        "pass on what the context worker answered, unchanged",
        field="first_gen_tokens",
    )


def _handoff(event: TransferEvent, cached: int) -> Handoff:
    return Handoff(event.nbytes, event.blocks, cached, event.admission_seconds, event.transfer_seconds)
