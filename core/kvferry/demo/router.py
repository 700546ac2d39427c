"""The demo's router: prefill at one worker, decode at the other, over the interface that any router has."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from kvferry.demo.processes import WorkerProcess
from kvferry_plugins.errors import ConfigError, KvferryError
from kvferry_plugins.types import ScheduleStyle

ANSWER_SECONDS = 300.0
INPUT_IS_WRONG = (400, 413)
"""Statuses that are about what the demo was asked, not about the workers."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's answer."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    text: str
    seconds_to_first_token: float
    nbytes: int
    blocks: int
    cached_tokens: int
    """Prompt tokens whose KV the generation worker had already."""
    handoff_seconds: float
    """From the request for the blocks to their end."""
    beside_prefill: bool = False
    """Generation-first: the time of the hand-off is that of the prefill, which lies in between."""


def ask(
    context: WorkerProcess,
    generation: WorkerProcess,
    prompt: str,
    max_tokens: int,
    on_text: Callable[[str], None],
    style: ScheduleStyle = ScheduleStyle.CONTEXT_FIRST,
) -> Answered:
    """Send a prompt through the pair, greedy, and show its text as it comes.

    Generation-first, the context worker answers before it has computed anything, and the generation worker is asked
    meanwhile.

    Raises:
        ConfigError: the prompt cannot be served.
        WorkerFailedError: a worker is gone, or says an error.
    """
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    started = time.monotonic()
    wanted = {"request_type": "context_only", "schedule_style": style.value}
    prefilled = _post(context, {**body, "disaggregated_params": wanted})
    choice, prompt_ids = prefilled["choices"][0], prefilled["prompt_token_ids"]
    if choice["finish_reason"] == "stop":
        on_text(choice["text"])
        seconds = time.monotonic() - started
        return Answered(prompt, tuple(prompt_ids), tuple(choice["token_ids"]), choice["text"], seconds, 0, 0, 0, 0.0)
    params = {**choice["disaggregated_params"], "request_type": "generation_only"}
    first: float | None = None
    texts: list[str] = []
    tokens: list[int] = []
    handoff: dict[str, Any] = {}
    fetched = {**body, "prompt": prompt_ids, "disaggregated_params": params}
    with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client:
        for chunk in stream(client, generation, fetched):
            first = first if first is not None else time.monotonic() - started
            texts.append(chunk["choices"][0]["text"])
            tokens.extend(chunk["choices"][0]["token_ids"])
            on_text(texts[-1])
            handoff = chunk.get("kvferry", {}).get("handoff", handoff)
    return Answered(
        prompt=prompt,
        prompt_token_ids=tuple(prompt_ids),
        output_token_ids=tuple(tokens),
        text="".join(texts),
        seconds_to_first_token=first or 0.0,
        nbytes=handoff.get("bytes", 0),
        blocks=handoff.get("blocks", 0),
        cached_tokens=handoff.get("cached_tokens", 0),
        handoff_seconds=handoff.get("seconds", 0.0),
        beside_prefill=style is ScheduleStyle.GENERATION_FIRST,
    )


def _post(worker: WorkerProcess, body: dict[str, Any]) -> dict[str, Any]:
    try:
        answer = httpx.post(f"{worker.http}/v1/completions", json=body, timeout=ANSWER_SECONDS, trust_env=False)
    except httpx.HTTPError as error:
        raise worker.failure(f"gave no answer ({error})") from error
    if answer.status_code != 200:
        raise _said(worker, answer.status_code, answer.content)
    result: dict[str, Any] = answer.json()
    return result


def stream(client: httpx.Client, worker: WorkerProcess, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer, up to ``[DONE]``.

    Raises:
        ConfigError: the request cannot be served.
        WorkerFailedError: the worker is gone, or says an error.
    """
    try:
        with client.stream("POST", f"{worker.http}/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                raise _said(worker, answer.status_code, answer.read())
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    yield _checked(worker, data)
    except httpx.HTTPError as error:
        raise worker.failure(f"broke its answer off ({error})") from error
    raise worker.failure("ended its answer without [DONE]")


def _checked(worker: WorkerProcess, data: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise worker.failure(f"stopped half-way: {event['error']['message']}")
    return event


def _said(worker: WorkerProcess, status: int, content: bytes) -> KvferryError:
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace")
    if status in INPUT_IS_WRONG:
        return ConfigError(message)
    return worker.failure(f"answered {status}: {message}")
