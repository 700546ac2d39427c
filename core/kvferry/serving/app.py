"""The HTTP side of a worker: its routes, on the HTTP thread, which computes nothing and waits for nobody."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvferry.serving.answers import Answer
from kvferry.serving.aside import Aside
from kvferry.serving.failures import Failure, RequestError, failure_of
from kvferry.serving.metrics import scrape
from kvferry.serving.output import Output
from kvferry.serving.protocol import MAX_BODY_BYTES, read_completion_request
from kvferry.serving.service import Service
from kvferry_plugins.errors import KvferryError

logger = logging.getLogger("kvferry.serving")

CLIENT_GONE = 499
"""Nobody hears this status; it is what nginx calls a client that hung up."""

ANSWER_SECONDS = 10.0
"""How long a status, or the metrics, may take."""

OPENMETRICS = "application/openmetrics-text"

T = TypeVar("T")


def make_app(service: Service) -> Starlette:
    """The routes of one worker."""

    async def completions(request: Request) -> Response:
        return await _complete(service, request)

    async def models(request: Request) -> Response:
        model = {"id": service.model_name, "object": "model", "created": started, "owned_by": "kvferry"}
        return JSONResponse({"object": "list", "data": [model]})

    async def healthz(request: Request) -> Response:
        return _state(None if service.loop.alive else "the engine's thread has ended", "alive")

    async def readyz(request: Request) -> Response:
        return _state(service.not_ready)

    async def status(request: Request) -> Response:
        try:
            return Response(await tell_status(), media_type="application/json")
        except RequestError as error:
            return _failed(error.failure)

    async def metrics(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        try:
            body, content_type = await tell_metrics[accept.startswith(OPENMETRICS)]()
        except RequestError as error:
            return _failed(error.failure)
        return Response(body, headers={"Content-Type": content_type})

    tell_status = Aside("status", lambda: json.dumps(service.status(), default=plain), ANSWER_SECONDS)
    tell_metrics = [
        Aside("metrics", lambda accept=accept: scrape(service.metrics, accept), ANSWER_SECONDS)  # type: ignore[misc]
        for accept in ("", f"{OPENMETRICS}; version=1.0.0")
    ]

    started = int(time.time())
    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/status", status),
            Route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _http_error},
    )


def plain(value: Any) -> Any:
    """Make what JSON does not know plain: read-only mappings, tuples, sets."""
    try:
        return dict(value)
    except (TypeError, ValueError):
        return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def _state(trouble: str | None, name: str = "ready") -> Response:
    return JSONResponse({"status": trouble or name}, status_code=503 if trouble else 200)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _failed(Failure(error.status_code, message, "not_found" if error.status_code == 404 else "invalid"))


def _failed(failure: Failure) -> Response:
    return JSONResponse(failure.body(), status_code=failure.status, headers=failure.headers)


async def _complete(service: Service, request: Request) -> Response:
    """Answer a completion; a status says how it went up to the first token, whether it is streamed or not.

    A context worker that starts generation-first answers before that: at once, or with a stream's first event.
    """
    output: Output | None = None
    streamed = False
    try:
        call = read_completion_request(await _body(request))
        prompt = await _unless_gone(request, service.prompt(call))
        output = Output(service, call, prompt)
        answer = Answer(output, await _unless_gone(request, output.started()), service.model_name)
        if call.stream:
            streamed = True
            return _EventStream(service, output, answer)
        if answer.comes_first:
            output.detach()
            return JSONResponse(answer.whole([]))
        return await _unless_gone(request, _whole(output, answer))
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    except Exception as error:
        if not isinstance(error, KvferryError | ValueError):
            logger.exception("internal error in a request")
        failure = failure_of(error)
        service.count_error(failure)
        return _failed(failure)
    finally:
        if output is not None and not streamed:
            output.close()


async def _body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise RequestError(f"the body is longer than {MAX_BODY_BYTES} bytes", status=413, code="too_long")
    return b"".join(chunks)


async def _whole(output: Output, answer: Answer) -> Response:
    pieces = [piece async for piece in output.pieces()]
    return JSONResponse(answer.whole(pieces))


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for ``work``, but not for a client that hung up. Raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events; a client that hangs up cancels the request, even before the first event."""

    def __init__(self, service: Service, output: Output, answer: Answer) -> None:
        events = _events(service, output, answer)
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._output = output

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._output.close()


async def _events(service: Service, output: Output, answer: Answer) -> AsyncIterator[str]:
    try:
        if answer.comes_first:
            yield _event(answer.first_chunk())
        async for piece in output.pieces():
            yield _event(answer.chunk(piece))
        if output.call.stream_options.include_usage:
            yield _event(answer.usage_chunk())
    except Exception as error:
        failure = failure_of(error)
        service.count_error(failure)
        yield _event(failure.body())
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
