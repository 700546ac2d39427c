"""uvicorn on a thread of its own, so that the main thread is left for signals."""

import asyncio
import ipaddress
import socket
import threading
import time

import uvicorn
from starlette.applications import Starlette

from kvferry_plugins.errors import ConfigError, KvferryError

START_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 75
"""Longer than routers keep idle connections, so that they close them first."""
GRACE_SECONDS = 5
"""How long answers under way may take once the server is told to stop."""


def bind_http(host: str, port: int) -> socket.socket:
    """Take the port, without listening yet.

    Raises:
        ConfigError: the host is beyond loopback, or the address cannot be had.
    """
    _require_loopback(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"HTTP cannot be bound to {host}:{port}: {reason}; choose another --port, or 0 for any free one",
            setting="port",
        ) from error
    return bound


def _require_loopback(host: str) -> None:
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"--host {host} is beyond loopback; /v1/completions has no authentication of its own, so a worker listens "
            "on 127.0.0.1 or ::1 only: put a proxy in front of it",
            setting="host",
        )


class HttpServer:
    """Serves an app on a bound socket until ``stop``."""

    def __init__(self, app: Starlette, bound: socket.socket) -> None:
        self._socket = bound
        config = uvicorn.Config(
            app,
            lifespan="off",
            loop="asyncio",
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="kvferry-http", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def start(self) -> None:
        """Listen; returns once connections are taken. Raises KvferryError if that does not happen."""
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise KvferryError(f"the HTTP server did not start on {self.url}")
            time.sleep(0.005)

    def stop(self) -> None:
        """Take no more connections, let answers under way finish, and end; idempotent."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(GRACE_SECONDS + 2)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))
