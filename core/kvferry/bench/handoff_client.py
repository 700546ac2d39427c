"""What a router does for one prompt, with the time of every token: prefill here, decode there, or both in one place."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvferry.bench.spans import Span, read_spans
from kvferry.demo.processes import WorkerProcess
from kvferry.demo.router import stream

ANSWER_SECONDS = 600.0


@dataclass(slots=True)
class Timed:
    """One request as its client saw it; seconds since it was sent."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """When each token was known here: the first one from whichever worker said it first."""
    spans: list[Span] = field(default_factory=list)
    nbytes: int = 0

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.seconds[0]

    @property
    def second(self) -> float:
        """Time to the second token: the first one that decoding yields."""
        return self.seconds[1]

    @property
    def total(self) -> float:
        """Time to the last token."""
        return self.seconds[-1]


class Router:
    """Sends prompts to workers, greedy, each to its end.

    Args:
        max_tokens: of each output; a stop token does not end it.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._client = httpx.Client(timeout=ANSWER_SECONDS, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def aggregated(self, worker: WorkerProcess, prompt: list[int]) -> Timed:
        """One worker does both."""
        began, timed = time.monotonic(), Timed(len(prompt))
        self._hear(timed, began, stream(self._client, worker, self._body(prompt)), worker)
        return self._finished(timed, began)

    def context_first(self, context: WorkerProcess, generation: WorkerProcess, prompt: list[int]) -> Timed:
        """The generation worker hears of the request when its prefill has ended."""
        began, timed = time.monotonic(), Timed(len(prompt))
        body = self._body(prompt)
        asked = {**body, "disaggregated_params": {"request_type": "context_only"}}
        params = self._hear(timed, began, stream(self._client, context, asked), context)
        fetched = {**body, "disaggregated_params": {**params, "request_type": "generation_only"}}
        self._hear(timed, began, stream(self._client, generation, fetched), generation, first=0)
        return self._finished(timed, began)

    def generation_first(self, context: WorkerProcess, generation: WorkerProcess, prompt: list[int]) -> Timed:
        """The generation worker hears of the request at once, and its blocks fill while the prompt is computed."""
        began, timed = time.monotonic(), Timed(len(prompt))
        body, said = self._body(prompt), Timed(len(prompt))
        wanted = {"request_type": "context_only", "schedule_style": "generation_first"}
        events = stream(self._client, context, {**body, "disaggregated_params": wanted})
        params = next(events)["choices"][0]["disaggregated_params"]
        listener = threading.Thread(target=self._hear, args=(said, began, events, context), name="context-answer")
        listener.start()
        try:
            fetched = {**body, "disaggregated_params": {**params, "request_type": "generation_only"}}
            self._hear(timed, began, stream(self._client, generation, fetched), generation)
        finally:
            listener.join()
        timed.seconds[0] = min(timed.seconds[0], *said.seconds)
        timed.spans = [*said.spans, *timed.spans]
        return self._finished(timed, began)

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        return {
            "prompt": prompt,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "timeline": True,
        }

    def _hear(
        self,
        timed: Timed,
        began: float,
        events: Iterator[dict[str, Any]],
        worker: WorkerProcess,
        first: int | None = None,
    ) -> dict[str, Any]:
        """Take a stream's tokens and spans in; returns its ``disaggregated_params``.

        Args:
            timed: filled.
            began: when the request was sent.
            events: the stream.
            worker: whose it is.
            first: position of the stream's first token in the output, where another worker has told that one already.
        """
        position = len(timed.tokens) if first is None else first
        params: dict[str, Any] = {}
        for event in events:
            now = time.monotonic() - began
            for choice in event["choices"]:
                params = choice.get("disaggregated_params") or params
                for token in choice["token_ids"]:
                    if position == len(timed.tokens):
                        timed.tokens.append(token)
                        timed.seconds.append(now)
                    position += 1
            ours = event.get("kvferry", {})
            timed.spans += read_spans(ours.get("timeline", ()), worker.name)
            timed.nbytes = ours.get("handoff", {}).get("bytes", timed.nbytes)
        return params

    def _finished(self, timed: Timed, began: float) -> Timed:
        timed.spans.insert(0, Span("request", began, began + timed.total, "client"))
        return timed
