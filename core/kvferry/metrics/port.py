"""A port of its own for metrics, answered by threads of its own: a scrape never waits for a worker's HTTP."""

import contextlib
import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server

logger = logging.getLogger("kvferry.metrics")

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def metrics_port(port: int, registry: CollectorRegistry) -> Iterator[str | None]:
    """Serve metrics on a loopback port until the end; one that cannot be had is a warning, and the worker goes on.

    Args:
        port: 0 = any free one.
        registry: what to serve.

    Yields:
        Its URL, or None.
    """
    try:
        server, thread = start_http_server(port, LOOPBACK, registry)
    except OSError as error:
        logger.warning(
            "--metrics-port %d cannot be had (%s): the worker goes on, its metrics are at /metrics of its own port",
            port,
            error.strerror or error,
        )
        yield None
        return
    try:
        yield f"http://{LOOPBACK}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
