"""What HTTP, signals and the command see of a running worker: its parts, and the door for requests."""

import asyncio
import functools
import itertools
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kvferry.dispatcher import WorkerParts, schedule_obstacle
from kvferry.integrations.transformers.engine import GenerationRequest, PagedEngine
from kvferry.integrations.transformers.loading import LoadedModel
from kvferry.integrations.transformers.sampling import SamplingParams
from kvferry.metrics.figures import TransferFigures
from kvferry.registry.door import Registry
from kvferry.registry.records import plain_record
from kvferry.serving.engine_loop import EngineLoop
from kvferry.serving.failures import Failure, RequestError
from kvferry.serving.metrics import service_metrics
from kvferry.serving.protocol import CompletionRequest
from kvferry.serving.steps import Job, News
from kvferry.serving.timeline import Timeline
from kvferry.tracing.ring import TraceRing
from kvferry_plugins.errors import PeerLostError
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import DisaggregatedParams, Role, ScheduleStyle

STALL_SECONDS = 10.0
"""A thread that is so long at one piece of work makes no progress."""

CHARACTERS_PER_TOKEN = 32
"""More than a token of real text has; a longer prompt is refused without tokenising it."""


@dataclass
class Service:
    """One side of a deployment, running."""

    role: Role
    model_name: str
    parts: WorkerParts
    transceiver: KvCacheTransceiver
    registry: Registry
    loaded: LoadedModel
    engine: PagedEngine
    loop: EngineLoop
    max_seq_len: int | None = None
    stall_seconds: float = STALL_SECONDS
    figures: TransferFigures = field(default_factory=TransferFigures)
    ring: TraceRing | None = None
    """Where the spans of a trace are kept; None = nobody wants one."""
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Answers that are an error, by status and code."""
    draining: threading.Event = field(default_factory=threading.Event)
    _ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _tokenizing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "kvferry-tokenizer"))
    """One thread: a tokenizer keeps its truncation's state, and HTTP's thread waits for nobody."""

    # --- requests ------------------------------------------------------------------------------------------------

    async def prompt(self, call: CompletionRequest) -> tuple[int, ...]:
        """Check what costs nothing, then tokenise, aside from HTTP's thread.

        Raises:
            RequestError: naming the parameter.
        """
        self._require_open()
        self._require_model(call)
        self._params(call)
        tokens = await self._tokens(call)
        self._require_length(call, len(tokens))
        return tokens

    def job(self, call: CompletionRequest, prompt: tuple[int, ...], tell: Callable[[News], None]) -> Job:
        """Make a job of a request.

        Args:
            call: the request.
            prompt: from ``prompt``.
            tell: called with its news, on the engine's thread.

        Raises:
            RequestError: naming the parameter.
        """
        self._require_open()  # again: tokenising may have taken a while
        params = self._params(call)
        seed = secrets.randbits(63) if call.seed is None else call.seed
        sampling = SamplingParams(call.temperature, call.top_p, seed)
        request = GenerationRequest(next(self._ids), prompt, call.max_tokens, sampling, call.ignore_eos)
        return Job(request, params, tell, Timeline(self.ring, request.request_id))

    @property
    def model_names(self) -> frozenset[str]:
        """What a client may call the model, in lower case."""
        folder = self.loaded.path
        return frozenset(name.lower() for name in (self.model_name, folder.name, str(folder), _without_digest(folder)))

    def _require_open(self) -> None:
        if self.draining.is_set():
            raise RequestError("this worker is draining and takes no new request", status=503, code="draining")
        if self.transceiver.unusable is not None:
            raise PeerLostError(f"this worker takes no new request: {self.transceiver.unusable}")

    def _require_model(self, call: CompletionRequest) -> None:
        if call.model is not None and call.model.lower() not in self.model_names:
            message = f"this worker serves {self.model_name!r}, not {call.model[:200]!r}"
            raise RequestError(message, param="model", status=404, code="model_not_found")

    def _params(self, call: CompletionRequest) -> DisaggregatedParams:
        if call.disaggregated_params is None:
            return DisaggregatedParams("context_and_generation")
        params = call.disaggregated_params.parsed()
        required = {"context_only": Role.CONTEXT, "generation_only": Role.GENERATION}.get(params.request_type)
        if required not in (None, self.role):
            raise RequestError(
                f"request_type {params.request_type!r} is for a {required} worker, this one is a {self.role} worker",
                param="disaggregated_params.request_type",
            )
        if required is not None:
            self._require_style(params.schedule_style)
        if params.request_type == "generation_only":
            self._require_first_token(params)
        return params

    def _require_style(self, style: ScheduleStyle) -> None:
        obstacle = schedule_obstacle(self.parts.plan, self.registry, style)
        if obstacle is not None:
            raise RequestError(obstacle, param="disaggregated_params.schedule_style")

    def _require_first_token(self, params: DisaggregatedParams) -> None:
        tokens = params.first_gen_tokens
        if not tokens and params.schedule_style is ScheduleStyle.GENERATION_FIRST:
            return  # it comes with the last bytes
        if len(tokens) != 1 or tokens[0] >= self.loaded.vocabulary_size:
            raise RequestError(
                "first_gen_tokens should be the one token that the context worker answered, "
                f"below {self.loaded.vocabulary_size}, but is {list(tokens)[:8]}",
                param="disaggregated_params.first_gen_tokens",
            )

    async def _tokens(self, call: CompletionRequest) -> tuple[int, ...]:
        prompt = call.only_prompt
        if isinstance(prompt, str):
            self._require_text(prompt)
            event_loop = asyncio.get_running_loop()
            prompt = await event_loop.run_in_executor(self._tokenizing, self._encode, prompt, call.add_special_tokens)
        if not prompt:
            raise RequestError("the prompt has no token", param="prompt")
        if max(prompt) >= self.loaded.vocabulary_size:
            raise RequestError(
                f"the prompt's token id {max(prompt)} is outside 0 … {self.loaded.vocabulary_size - 1}", param="prompt"
            )
        return tuple(prompt)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self.loaded.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return tokens

    def _require_text(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"the prompt is no valid Unicode: a lone surrogate at character {error.start}"
            raise RequestError(message, param="prompt") from error
        limit = self._token_limit
        if limit is not None and len(text) > limit * CHARACTERS_PER_TOKEN:
            raise RequestError(
                f"the prompt's {len(text)} characters exceed {limit * CHARACTERS_PER_TOKEN}, "
                f"{CHARACTERS_PER_TOKEN} for each of the {limit} tokens that this worker serves",
                param="prompt",
                code="context_length_exceeded",
            )

    @property
    def _token_limit(self) -> int | None:
        return min((limit for limit in (self.max_seq_len, self.loaded.max_tokens) if limit is not None), default=None)

    def _require_length(self, call: CompletionRequest, prompt_tokens: int) -> None:
        limit = self._token_limit
        if limit is not None and prompt_tokens + call.max_tokens > limit:
            raise RequestError(
                f"{prompt_tokens} prompt tokens and max_tokens={call.max_tokens} exceed "
                f"the {limit} tokens that this worker serves",
                param="prompt" if prompt_tokens >= limit else "max_tokens",
                code="context_length_exceeded",
            )

    def decode(self, token_ids: list[int]) -> str:
        """Token ids → text, without special tokens."""
        text: str = self.loaded.tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether new requests are welcome."""
        return self.not_ready is None

    @property
    def not_ready(self) -> str | None:
        """Why new requests are not welcome; None = they are."""
        if self.draining.is_set():
            return "draining"
        if not self.loop.alive or not self.transceiver.status_dump().get("loop_alive", True):
            return "the engine or the transfer loop has ended"
        return self.transceiver.unusable or self.stalled

    @property
    def stalled(self) -> str | None:
        """Which thread has work and does not move, and where it hangs; None = both move, or rest."""
        return self.transceiver.stalled(self.stall_seconds) or self.loop.pulse.stalled(self.stall_seconds)

    @functools.cached_property
    def metrics(self) -> CollectorRegistry:
        """What Prometheus is told."""
        return service_metrics(self)

    def count_error(self, failure: Failure) -> None:
        """Count an answer that is an error; HTTP's thread."""
        self.errors[str(failure.status), failure.code] += 1

    @property
    def drained(self) -> bool:
        """Whether no job is left and no block is in use, not even by a transfer or in quarantine."""
        return self.loop.idle and all(group["in_use"] == 0 for group in self.statistics())

    def statistics(self) -> list[dict[str, Any]]:
        """The manager's blocks, by group."""
        manager = self.parts.manager
        return [asdict(manager.statistics(group)) for group in range(len(manager.layout.groups))]

    def status(self) -> dict[str, Any]:
        """Everything, as plain JSON values; asks neither the engine's thread nor the transfer loop."""
        from kvferry.cli.explain import plain_plan

        plan = self.parts.plan
        architectures = (plan.architecture, plan.execution_architecture)
        model = dict(zip(("architecture", "execution_architecture"), architectures, strict=True))
        return {
            "role": self.role.value,
            "model": self.model_name,
            "ready": self.ready,
            "not_ready": self.not_ready,
            "draining": self.draining.is_set(),
            "drained": self.drained,
            "plan": {**plain_plan(plan, model=model), "warnings": list(plan.warnings)},
            "plugins": self.registry.plugin_set(),
            "parent": self.parts.parent.dump() if self.parts.parent is not None else None,
            "plugin_records": [plain_record(record) for record in self.registry.records()],
            "observers": {name: asdict(counts) for name, counts in self.registry.observer_counts().items()},
            "engine": {"alive": self.loop.alive, **self.loop.counts(), "progress": self.loop.pulse.dump()},
            "manager": {"kind": self.parts.manager.kind, "groups": self.statistics()},
            "transceiver": self.transceiver.status_dump(),
        }


def _without_digest(folder: Path) -> str:
    """A converted model's name without what tells conversions apart."""
    return folder.name.rpartition("-")[0] or folder.name
