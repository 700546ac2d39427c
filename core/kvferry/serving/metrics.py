"""What a worker tells Prometheus beyond what every engine has: its requests, and whether it makes progress."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from kvferry.metrics.collector import WorkerCollector, metrics_registry, worker_parts
from kvferry.metrics.families import counter, gauge
from kvferry.metrics.parts import Dump

if TYPE_CHECKING:
    from kvferry.serving.service import Service


def service_metrics(service: "Service") -> CollectorRegistry:
    """All metrics of one service, read when they are asked for."""
    parts = worker_parts(
        manager=service.parts.manager,
        figures=service.figures,
        plan=service.parts.plan,
        registry=service.registry,
    )
    parts["serving"] = lambda dump: of_service(service, dump)
    return metrics_registry(WorkerCollector(parts, service.transceiver.status_dump))


def scrape(metrics: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The body and the content type of an answer, in the format that a client accepts."""
    encode, content_type = choose_encoder(accept)
    return encode(metrics), content_type


def of_service(service: "Service", dump: Dump) -> Iterator[Metric]:
    """Requests, readiness, and the two threads that must move; a plugin's transceiver may not say whether it does."""
    transfer = dump.get("progress", {}).get("seconds_since_progress")
    progress = {"engine": service.loop.pulse.seconds, **({"transfer": transfer} if transfer is not None else {})}
    loop, trace = service.loop, service.ring
    yield gauge("ready", "Whether new requests are welcome and progress is made", (), {(): service.ready})
    yield gauge(
        "draining", "Whether the worker finishes what it has and takes nothing new", (), {(): service.draining.is_set()}
    )
    yield gauge(
        "seconds_since_progress",
        "For how long a thread has been at one piece of work; 0 while it has none",
        ("thread",),
        progress,
    )
    yield gauge("requests_in_progress", "Requests by what they do", ("state",), loop.counts())
    yield counter("requests", "Requests that ended, by type and by how", ("type", "result"), dict(loop.ended))
    yield counter("suspensions", "Times that a request's blocks were lent to an older one", (), {(): loop.suspensions})
    yield counter(
        "request_errors", "Answers that are an error, by status and code", ("status", "code"), dict(service.errors)
    )
    if trace is not None:
        yield counter(
            "trace_dropped_entries", "Entries of the trace that made room for newer ones", (), {(): trace.dropped}
        )
