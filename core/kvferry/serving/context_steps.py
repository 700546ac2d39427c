"""A context worker's part: prefill, offer what is computed, and keep the blocks until the hand-off has ended."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvferry.integrations.transformers.engine import PagedEngine, RunningRequest
from kvferry.serving.first_token import pack_first_token
from kvferry.serving.steps import Ended, Generated, Job, Started, Steps, Turn, computed, heed
from kvferry.transceiver.params import with_sampler
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import DisaggregatedParams, ScheduleStyle, TransferRequest


@dataclass(frozen=True, slots=True)
class ContextSteps:
    """Makes the steps of ``context_only`` requests.

    Context-first, the parameters are told with the first token; generation-first, before anything is computed, and the
    first token travels with the last bytes. Either way it is sent along, and the generation worker compares.
    """

    engine: PagedEngine
    transceiver: KvCacheTransceiver
    pipelined: bool
    """Offer each chunk as soon as it is computed, and not only the whole."""

    def steps(self, job: Job) -> Steps:
        """The steps of one request."""
        job.timeline.begin()
        running = self.engine.start(job.request)
        transfer = TransferRequest(job.request_id, job.request.prompt_token_ids)
        try:
            with self._withdrawn_on_error(transfer):
                if job.generation_first:
                    self.transceiver.prepare_context_requests([transfer])
                    job.tell(Started(running.cached_tokens, params=self._params(job, transfer)))
                yield from self._prefill(job, running, transfer)
                if job.generation_first:
                    self._offer(job, running, transfer)
                    self._tell_first(job, running)
                elif running.finish_reason == "stop":
                    self._tell_over(job, running, transfer)
                    return
                else:
                    self._offer(job, running, transfer)
                    first = running.output_token_ids[0]
                    job.tell(Started(running.cached_tokens, params=self._params(job, transfer, first)))
                    self._tell_first(job, running)
                yield Turn.TRANSFER
        finally:
            self.engine.finish(running)

    def _prefill(self, job: Job, running: RunningRequest, transfer: TransferRequest) -> Steps:
        """Compute the prompt; the transfer's end, which can only be an early one, ends it too."""
        step = job.timeline.timed("prefill", self.engine.prefill_step)
        if running.cached_tokens:
            self._offer_chunk(job, transfer, running.cached_tokens)
        while True:
            tokens = yield from computed(step, running)
            if running.prefilled:
                return
            self._offer_chunk(job, transfer, tokens)
            heed((yield Turn.NEXT))

    def _offer_chunk(self, job: Job, transfer: TransferRequest, tokens: int) -> None:
        if self.pipelined:
            self.transceiver.respond_and_send_async(transfer, tokens, last=False)
            job.timeline.offered(tokens)

    def _offer(self, job: Job, running: RunningRequest, transfer: TransferRequest) -> None:
        ended = running.finish_reason == "stop"
        aux = pack_first_token(running.output_token_ids[0], sampled=running.sampled, ended=ended)
        self.transceiver.respond_and_send_async(replace(transfer, aux=aux))
        job.timeline.offered(len(transfer.prompt_token_ids))

    def _params(self, job: Job, transfer: TransferRequest, first: int | None = None) -> DisaggregatedParams:
        """What a router passes on; without the first token where that is still to come."""
        params = self.transceiver.get_disaggregated_params(transfer)
        params = replace(
            params,
            first_gen_tokens=() if first is None else (first,),
            schedule_style=ScheduleStyle.CONTEXT_FIRST if first is not None else ScheduleStyle.GENERATION_FIRST,
        )
        sampled = job.request.sampling.temperature > 0
        return with_sampler(params, job.request.sampling.seed if sampled else None, counter=1, first_token=first)

    def _tell_first(self, job: Job, running: RunningRequest) -> None:
        job.tell(Generated(running.output_token_ids[0]))
        job.tell(Ended("stop" if running.finish_reason == "stop" else "length"))

    def _tell_over(self, job: Job, running: RunningRequest, transfer: TransferRequest) -> None:
        """A router goes no further, and there is nothing to decode: no hand-off that nobody would fetch."""
        if self.transceiver.has_inflight_transfer(transfer):  # of earlier chunks
            self.transceiver.cancel_request(transfer)
        params = DisaggregatedParams("context_only", (running.output_token_ids[0],), ctx_request_id=job.request_id)
        job.tell(Started(running.cached_tokens, params=params))
        self._tell_first(job, running)

    @contextmanager
    def _withdrawn_on_error(self, transfer: TransferRequest) -> Iterator[None]:
        """Take back what was offered, and tell the generation worker why, unless the request ends well."""
        try:
            yield
        except BaseException as error:
            if self.transceiver.has_inflight_transfer(transfer):
                self.transceiver.cancel_request(transfer, _why(error))
            raise


def _why(error: BaseException) -> str:
    """What the generation worker hears of a prefill that came to nothing."""
    if isinstance(error, GeneratorExit):
        return "its prefill was cancelled"
    return f"its prefill failed: {type(error).__name__}: {error}"
