"""What may hang is asked on a thread of its own, so that HTTP's thread goes on answering."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvferry.serving.failures import RequestError

MOST_AT_A_TIME = 4
"""Threads that may hang in one question; who asks then is refused at once."""

T = TypeVar("T")


class Aside(Generic[T]):
    """Asks a function of no argument, on the event loop's behalf.

    Args:
        name: what it tells, for an error.
        ask: the function; any thread's.
        seconds: how long to wait for it.
    """

    def __init__(self, name: str, ask: Callable[[], T], seconds: float) -> None:
        self._name = name
        self._ask = ask
        self._seconds = seconds
        self._under_way: set[asyncio.Future[T]] = set()

    async def __call__(self) -> T:
        """Ask, on the event loop's thread.

        Raises:
            RequestError: 503, if there is no answer in time.
            Exception: what the function raised.
        """
        if len(self._under_way) >= MOST_AT_A_TIME:
            raise self._stalled(f"{len(self._under_way)} have asked before")
        answer = self._start()
        self._under_way.add(answer)
        answer.add_done_callback(self._under_way.discard)
        try:
            return await asyncio.wait_for(asyncio.shield(answer), self._seconds)
        except TimeoutError as error:
            raise self._stalled(f"after {self._seconds:g} s") from error

    def _start(self) -> "asyncio.Future[T]":
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(self._ask())
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=run, name=f"kvferry-{self._name}", daemon=True).start()
        return asyncio.wrap_future(answer)

    def _stalled(self, why: str) -> RequestError:
        message = f"no answer about {self._name} ({why}): a thread of this worker hangs, which /readyz may name"
        return RequestError(message, status=503, code="stalled")
