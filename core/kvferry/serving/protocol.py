"""What a client may send to ``/v1/completions``, as OpenAI's and TensorRT-LLM's clients send it."""

import base64
import binascii
import json
import reprlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from kvferry.config.nearest import did_you_mean
from kvferry.serving.failures import RequestError
from kvferry_plugins.types import DisaggregatedParams, ScheduleStyle

MAX_BODY_BYTES = 16 << 20
ENDPOINT_CHARACTERS = 300
"""A host name has at most 253."""
SHOWN_CHARACTERS = 60
ENDPOINT = r"^tcp://[^\s/:]+:\d{1,5}$|^tcp://\[[0-9a-fA-F:.%]+\]:\d{1,5}$"

Zero = Annotated[float, Field(ge=0, le=0)]
Id = Annotated[int, Field(ge=0, lt=2**64)]
Token = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
RequestType = Literal["context_only", "generation_only", "context_and_generation"]

_STYLES = {"context_first": ScheduleStyle.CONTEXT_FIRST, "generation_first": ScheduleStyle.GENERATION_FIRST}


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class HandoffParams(_Section):
    """``disaggregated_params`` as TensorRT-LLM has them over HTTP."""

    request_type: RequestType
    first_gen_tokens: list[Token] | None = None
    ctx_request_id: Id | None = None
    encoded_opaque_state: str | None = None
    draft_tokens: Annotated[list[Token], Field(max_length=0)] | None = None
    """Speculative decoding does not exist here, so there are none."""
    disagg_request_id: Id | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: Annotated[str, StringConstraints(pattern=ENDPOINT, max_length=ENDPOINT_CHARACTERS)] | None = None
    schedule_style: Literal["context_first", "generation_first", 0, 1] | None = None

    def parsed(self) -> DisaggregatedParams:
        """The same as the contract's type. Raises RequestError."""
        style = self.schedule_style
        name = ("context_first", "generation_first")[style] if isinstance(style, int) else style
        return DisaggregatedParams(
            request_type=self.request_type,
            first_gen_tokens=tuple(self.first_gen_tokens or ()),
            ctx_request_id=self.ctx_request_id,
            opaque_state=_decoded(self.encoded_opaque_state),
            disagg_request_id=self.disagg_request_id,
            ctx_dp_rank=self.ctx_dp_rank,
            ctx_info_endpoint=self.ctx_info_endpoint,
            schedule_style=_STYLES[name or "context_first"],
        )


class StreamOptions(_Section):
    """What a stream says besides its text."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class CompletionRequest(_Section):
    """The body. What this worker cannot do is accepted only where it asks for nothing."""

    prompt: str | Tokens | Annotated[list[str | Tokens], Field(min_length=1, max_length=1, fail_fast=True)]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """0 = greedy, also where nothing is said, as TensorRT-LLM does."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] = ()  # type: ignore[assignment]
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    add_special_tokens: bool = True
    disaggregated_params: HandoffParams | None = None
    timeline: bool = False
    """Say when what happened, in ``kvferry.timeline``."""
    user: str | None = None
    n: Annotated[int, Field(ge=1, le=1)] = 1
    best_of: Annotated[int, Field(ge=1, le=1)] = 1
    echo: Literal[False] = False
    presence_penalty: Zero = 0.0
    frequency_penalty: Zero = 0.0

    @property
    def request_type(self) -> RequestType:
        """What this worker is to do."""
        return self.disaggregated_params.request_type if self.disaggregated_params else "context_and_generation"

    @property
    def only_prompt(self) -> str | list[int]:
        """The prompt, without the list around it that some clients put."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            return prompt[0]
        return prompt  # type: ignore[return-value]

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end the output, without empty ones."""
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        return tuple(text for text in texts if text)


def read_completion_request(body: bytes) -> CompletionRequest:
    """Read and check a body; null is the same as nothing.

    Raises:
        RequestError: 400, naming the first field that is wrong.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"the body should be a JSON object, but is {type(values).__name__}")
    try:
        return CompletionRequest.model_validate(_without_nulls(values))
    except ValidationError as error:
        raise _request_error(error) from error


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if value is not None}
    for key in ("disaggregated_params", "stream_options"):
        if isinstance(kept.get(key), dict):
            kept[key] = {name: value for name, value in kept[key].items() if value is not None}
    return kept


def _request_error(error: ValidationError) -> RequestError:
    detail = error.errors(include_url=False)[0]
    path = [str(part) for part in detail["loc"]]
    if not path:  # pydantic names no place for these
        return RequestError("the body has a key that is no valid Unicode")
    nested = path[0] in ("disaggregated_params", "stream_options")
    param = _short(".".join(path[: 2 if nested else 1]))
    if detail["type"] == "extra_forbidden":
        sections: dict[str, type[BaseModel]] = {"disaggregated_params": HandoffParams, "stream_options": StreamOptions}
        known = sections.get(path[0], CompletionRequest) if nested else CompletionRequest
        return RequestError(
            f"{param}: this worker knows no such parameter{did_you_mean(path[-1], known.model_fields)}", param=param
        )
    if detail["type"] == "missing":
        return RequestError(f"{param} is missing", param=param)
    shown = _short(reprlib.repr(detail["input"]))
    if param == "prompt":
        return RequestError(
            f"prompt should be text or a list of token ids ≥ 0, one prompt, but is {shown}", param=param
        )
    return RequestError(f"{param}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, but is {shown}", param=param)


def _short(text: str) -> str:
    """Keep an error from echoing a whole body, or what JSON can hold and UTF-8 cannot."""
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
    return shown.encode(errors="backslashreplace").decode()


def _decoded(encoded: str | None) -> bytes | None:
    if encoded is None:
        return None
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"encoded_opaque_state is no base64 ({error}): pass on what the context worker answered, unchanged",
            param="disaggregated_params.encoded_opaque_state",
        ) from error


def encode_params(params: DisaggregatedParams, *, asked: HandoffParams | None) -> dict[str, object]:
    """Write the parameters of a context answer for the router; it changes ``request_type`` and passes them on.

    Args:
        params: from the transceiver.
        asked: what the client sent, whose ``disagg_request_id`` and ``ctx_dp_rank`` come back.
    """
    given = asked.disagg_request_id if asked else None
    state = params.opaque_state
    return {
        "request_type": "context_only",
        "first_gen_tokens": list(params.first_gen_tokens),
        "ctx_request_id": params.ctx_request_id,
        "encoded_opaque_state": base64.b64encode(state).decode() if state is not None else None,
        "draft_tokens": None,
        "disagg_request_id": given if given is not None else params.disagg_request_id,
        "ctx_dp_rank": asked.ctx_dp_rank if asked else None,
        "ctx_info_endpoint": params.ctx_info_endpoint,
        "schedule_style": "generation_first" if params.schedule_style is ScheduleStyle.GENERATION_FIRST else None,
    }
