"""What a request's life is made of: steps, what a step may wait for, and the news that its client hears."""

import enum
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from kvferry.integrations.transformers.engine import FinishReason, GenerationRequest, PagedEngine, RunningRequest
from kvferry.serving.timeline import Timeline
from kvferry_plugins.errors import CacheFullError, KvferryError, TransferCancelledError
from kvferry_plugins.types import DisaggregatedParams, ScheduleStyle, TransferEvent


class Turn(enum.Enum):
    """What a step waits for."""

    NEXT = "next"
    TRANSFER = "transfer"
    ROOM = "room"
    """For blocks that another request gives back or lends; NoRoomError is thrown in where nobody will."""


class NoRoomError(KvferryError):
    """Nobody is there who could give blocks back."""


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
    """Nothing can go wrong any more that a status could tell.

    The first token is there, or, at a context worker that starts generation-first, the request has its blocks.
    """

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
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def request_id(self) -> int:
        """The key of its blocks."""
        return self.request.request_id

    def over(self, how: str) -> None:
        """It has ended: completed, failed or cancelled."""
        context, tokens = self.params.ctx_request_id, len(self.request.prompt_token_ids)
        self.timeline.over(type=self.params.request_type, ended=how, prompt_tokens=tokens, ctx_request_id=context)

    @property
    def generation_first(self) -> bool:
        """Whether the generation worker hears of it before its prefill ends."""
        return self.params.schedule_style is ScheduleStyle.GENERATION_FIRST


def computed(
    step: Callable[[RunningRequest], int], running: RunningRequest
) -> Generator[Turn, TransferEvent | None, int]:
    """Make a step of the engine, after others have made room if it needs some. Raises CacheFullError."""
    while True:
        try:
            return step(running)
        except CacheFullError as error:
            full = error
        try:
            heed((yield Turn.ROOM))
        except NoRoomError:
            raise full from None


def heed(event: TransferEvent | None) -> None:
    """End a request whose transfer has ended before its time. Raises what it ended with."""
    if event is not None:
        cause = event.error
        raise cause or TransferCancelledError(f"its transfer was {event.outcome}", request_id=event.request_id)


def decoded(engine: PagedEngine, job: Job, running: RunningRequest) -> Steps:
    """Tell the first token, and compute the others."""
    step = job.timeline.timed("decode", engine.decode_step)
    job.tell(Generated(running.output_token_ids[-1]))
    while running.finish_reason is None:
        yield Turn.NEXT
        job.tell(Generated((yield from computed(step, running))))
    job.tell(Ended(running.finish_reason))
