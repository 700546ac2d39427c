"""A worker's trace, written to its file at the end and whenever somebody asks for it."""

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.serving.service import Service
from kvferry.tracing.perfetto import write_events
from kvferry.tracing.ring import Entry, events_of
from kvferry_plugins.errors import ConfigError

logger = logging.getLogger("kvferry.serving")


class TraceFile:
    """Writes what the ring of a service holds, and the handshakes that its transceiver remembers.

    Args:
        service: whose.
        path: the file; None = no trace was asked for.
    """

    def __init__(self, service: Service, path: Path | None) -> None:
        self._service = service
        self._path = path
        self._writing = threading.Lock()

    def write_now(self) -> None:
        """Have the trace so far written, by a thread of its own: a signal's handler must not wait, nor log."""
        threading.Thread(target=self._on_demand, name="kvferry-trace", daemon=True).start()

    def _on_demand(self) -> None:
        if self._path is None:
            logger.warning("SIGUSR2 asks for a trace, but none is kept: start the worker with --trace FILE")
        else:
            self._write(self._path)

    def write_at_end(self) -> None:
        """Write the whole trace, if there is one."""
        if self._path is not None:
            self._write(self._path)

    def _write(self, path: Path) -> None:
        service, ring = self._service, self._service.ring
        assert ring is not None
        entries = [*ring.entries(), *_handshakes(service)]
        events = events_of(entries, process=os.getpid(), process_name=f"{service.role.value} worker")
        try:
            with self._writing:
                write_events(events, path, dropped=ring.dropped, role=service.role.value)
        except ConfigError as error:
            logger.error("%s", error)
        else:
            logger.info("wrote %d entries of the trace to %s; %d had made room", len(entries), path, ring.dropped)


def _handshakes(service: Service) -> Iterator[Entry]:
    told: Any = service.transceiver.status_dump().get("handshakes", {})
    for number, each in enumerate(told.get("recent", ())):
        arguments = {"peer": each["peer"], "fields": each["fields"]}
        yield Entry(number, "handshake", number, each["result"], each["started"], each["ended"], arguments)
