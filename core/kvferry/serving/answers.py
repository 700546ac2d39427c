"""The answers of ``/v1/completions``, whole or as chunks, in OpenAI's shape with our additions.

Ours are ``choices[].token_ids``, ``choices[].disaggregated_params`` and ``prompt_token_ids`` (as TensorRT-LLM has
them), and ``kvferry.handoff``.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from kvferry.serving.output import Output, Piece
from kvferry.serving.protocol import encode_params
from kvferry.serving.steps import Handoff, Started
from kvferry_plugins.types import ScheduleStyle


class Answer:
    """Writes what one request yields."""

    def __init__(self, output: Output, started: Started, model: str) -> None:
        self._output = output
        self._started = started
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def comes_first(self) -> bool:
        """Whether there is something to pass on before any token: generation-first."""
        params = self._started.params
        return params is not None and params.schedule_style is ScheduleStyle.GENERATION_FIRST

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer in one object; without a piece it is what comes first."""
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.token_ids]
        choice = self._choice(text, tokens, pieces[-1].finish_reason if pieces else None)
        if not pieces:
            choice |= self._params()
        return {**self._head, "choices": [choice], "usage": self._usage(), **self._additions()}

    def first_chunk(self) -> dict[str, Any]:
        """What comes first, as the first event of a stream."""
        choice = self._choice("", [], None) | self._params()
        return {**self._head, "choices": [choice], **self._additions()}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One piece; the last one carries what a whole answer has besides its text."""
        choice = self._choice(piece.text, list(piece.token_ids), piece.finish_reason)
        return {**self._head, "choices": [choice], **(self._additions() if piece.finish_reason else {})}

    def usage_chunk(self) -> dict[str, Any]:
        """What OpenAI sends at the end of a stream that asked for ``include_usage``."""
        return {**self._head, "choices": [], "usage": self._usage()}

    def _choice(self, text: str, token_ids: list[int], finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "token_ids": token_ids,
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        return choice | self._params() if finish_reason is not None else choice

    def _params(self) -> dict[str, Any]:
        if self._started.params is None:
            return {}
        asked = self._output.call.disaggregated_params
        return {"disaggregated_params": encode_params(self._started.params, asked=asked)}

    def _usage(self) -> dict[str, Any]:
        prompt, generated = len(self._output.prompt), self._output.generated
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._started.cached_tokens},
        }

    def _additions(self) -> dict[str, Any]:
        additions: dict[str, Any] = {}
        if self._started.params is not None:
            additions["prompt_token_ids"] = list(self._output.prompt)
        if self._started.handoff is not None:
            additions["kvferry"] = {"handoff": _figures(self._started.handoff)}
        if self._output.call.timeline:
            additions.setdefault("kvferry", {})["timeline"] = self._output.timeline.plain()
        return additions


def _figures(handoff: Handoff) -> dict[str, Any]:
    seconds = handoff.admission_seconds + handoff.transfer_seconds
    return {
        "bytes": handoff.nbytes,
        "blocks": handoff.blocks,
        "cached_tokens": handoff.cached_tokens,
        "seconds": seconds,
        "admission_seconds": handoff.admission_seconds,
        "transfer_seconds": handoff.transfer_seconds,
    }
