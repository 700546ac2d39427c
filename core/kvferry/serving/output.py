"""One request's output on its way from the engine's thread to a client."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kvferry.serving.protocol import CompletionRequest
from kvferry.serving.service import Service
from kvferry.serving.steps import Ended, Failed, Generated, News, Started
from kvferry.serving.text import StopTexts, TextStream
from kvferry.serving.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to the answer."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


class Output:
    """Submits a request; ``started``, then ``pieces``; ``close`` in any case, which cancels what has not ended.

    Raises (on construction):
        RequestError: the request cannot be served.
    """

    def __init__(self, service: Service, call: CompletionRequest, prompt: tuple[int, ...]) -> None:
        self.call = call
        self._service = service
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._event_loop = asyncio.get_running_loop()
        self._job = service.job(call, prompt, self._tell)
        self.prompt = prompt
        self.generated = 0
        self._ended = False
        service.loop.submit(self._job)

    def _tell(self, news: News) -> None:
        with contextlib.suppress(RuntimeError):  # the HTTP server has ended
            self._event_loop.call_soon_threadsafe(self._news.put_nowait, news)

    @property
    def timeline(self) -> Timeline:
        """What took its time; whole once the output is."""
        return self._job.timeline

    async def started(self) -> Started:
        """Wait until a status can be told: for the first token, or for the parameters of a prefill to come.

        Raises what the request failed with.
        """
        news = await self._next()
        assert isinstance(news, Started)
        return news

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield a piece a token, then one with the ``finish_reason``. Raises what the request failed with."""
        text, stops = TextStream(self._service.decode, self.prompt), StopTexts(self.call.stop_texts)
        while not isinstance(news := await self._next(), Ended):
            assert isinstance(news, Generated)
            self.generated += 1
            yield Piece(stops.push(text.push(news.token)), (news.token,))
            if stops.found:
                self.close()
                yield Piece("", finish_reason="stop")
                return
        rest = stops.push(text.end())
        yield Piece(rest + stops.end(), finish_reason="stop" if stops.found else news.reason)

    async def _next(self) -> News:
        news = await self._news.get()
        if isinstance(news, Failed):
            self._ended = True
            raise news.error
        self._ended = self._ended or isinstance(news, Ended)
        return news

    def detach(self) -> None:
        """Let the request go on although nobody listens any more: the generation worker does."""
        self._ended = True

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        if not self._ended:
            self._ended = True
            self._service.loop.cancel(self._job)
