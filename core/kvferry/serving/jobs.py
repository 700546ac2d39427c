"""A request's life as a generator of steps; whichever way it ends, its blocks go back.

A step is a chunk of prefill or one token. A generator yields what it waits for (``Turn``), and is sent the end of its
transfer as soon as that is known. Closing it cancels the request.
"""

from dataclasses import dataclass

from kvferry.integrations.transformers.engine import PagedEngine
from kvferry.serving.context_steps import ContextSteps
from kvferry.serving.generation_steps import GenerationSteps
from kvferry.serving.steps import Job, Started, Steps, Turn, computed, decoded
from kvferry_plugins.errors import CacheFullError
from kvferry_plugins.transceiver import KvCacheTransceiver


@dataclass(frozen=True, slots=True)
class Jobs:
    """Starts jobs on one engine and one transceiver."""

    engine: PagedEngine
    transceiver: KvCacheTransceiver
    pipelined: bool = False
    """Whether a context worker offers each chunk of a prefill."""

    def steps(self, job: Job) -> Steps:
        """The steps of a job, not begun yet."""
        match job.params.request_type:
            case "context_only":
                return ContextSteps(self.engine, self.transceiver, self.pipelined).steps(job)
            case "generation_only":
                return GenerationSteps(self.engine, self.transceiver).steps(job)
            case _:
                return self._aggregated(job)

    def suspend(self, job: Job) -> bool:
        """Move a request's blocks off the device; False where that cannot be: no tier, no room there, or a transfer."""
        try:
            self.engine.suspend(job.request_id)
        except (CacheFullError, NotImplementedError, ValueError, KeyError):
            return False
        return True

    def resume(self, job: Job) -> bool:
        """Bring a suspended request's blocks back; False: no room yet.

        Raises:
            CorruptBlockError: a block is lost, and the request with it.
        """
        try:
            self.engine.resume(job.request_id)
        except CacheFullError:
            return False
        return True

    def _aggregated(self, job: Job) -> Steps:
        job.timeline.begin()
        step = job.timeline.timed("prefill", self.engine.prefill_step)
        running = self.engine.start(job.request)
        try:
            while True:
                yield from computed(step, running)
                if running.prefilled:
                    break
                yield Turn.NEXT
            job.tell(Started(running.cached_tokens))
            yield from decoded(self.engine, job, running)
        finally:
            self.engine.finish(running)
