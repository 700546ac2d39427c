"""Fetches one document over HTTP from whoever is there, in bounded time and of bounded size."""

import socket
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from threading import Event, Timer
from urllib.parse import urlsplit

SILENT_SECONDS = 5.0
"""That the other side may say nothing."""
WHOLE_SECONDS = 15.0
"""That its whole answer may take."""
MOST_BYTES = 64 << 20


def fetch(url: str) -> bytes:
    """Get what is at an address; nothing that it refers to is followed, and no proxy is asked.

    Raises:
        ConnectionError: nobody is there.
        InvalidURL: the address is none.
        OSError, HTTPException: what is there does not answer in time, wholly, or with 200.
    """
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout=SILENT_SECONDS)) as connection:
        connection.putrequest("GET", f"{parts.path}?{parts.query}" if parts.query else parts.path)
        _connect(connection)
        is_over = Event()
        limit = Timer(WHOLE_SECONDS, _hang_up, (connection.sock, is_over))
        limit.daemon = True
        limit.start()
        try:
            body = _get(connection)
        except (OSError, HTTPException):
            if not is_over.is_set():
                raise
        finally:
            limit.cancel()
    if is_over.is_set():
        raise TimeoutError(f"its answer is not whole after {WHOLE_SECONDS:g} s")
    return body


def _connect(connection: HTTPConnection) -> None:
    try:
        connection.connect()
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _hang_up(connected: socket.socket, is_over: Event) -> None:
    is_over.set()
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _get(connection: HTTPConnection) -> bytes:
    connection.endheaders()
    with closing(connection.getresponse()) as answer:
        if answer.status != 200:
            raise HTTPException(f"it answers {answer.status} {answer.reason}")
        body = answer.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise HTTPException(f"its answer has more than {MOST_BYTES >> 20} MiB")
    return body
