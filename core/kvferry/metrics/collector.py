"""All parts of one worker behind one collector, which reads them when it is scraped and costs nothing else."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.metrics import parts
from kvferry.metrics.families import counter
from kvferry.metrics.figures import TransferFigures
from kvferry.metrics.parts import Dump
from kvferry.registry.door import Registry
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.types import Plan

logger = logging.getLogger("kvferry.metrics")

T = TypeVar("T")

STATUS = "status_dump"

Part = Callable[[Dump], Iterable[Metric]]


class WorkerCollector(Collector):
    """Asks each part at a scrape; one that raises is left out, counted, and logged the first time.

    Args:
        parts: by name.
        status_dump: the transceiver's, asked once a scrape; each part gets what it says.
    """

    def __init__(self, parts: Mapping[str, Part], status_dump: Callable[[], Dump]) -> None:
        self._parts = dict(parts)
        self._status_dump = status_dump
        self._errors: Counter[str] = Counter(dict.fromkeys((*parts, STATUS), 0))

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        dump: Dump = self._ask(STATUS, self._status_dump, {})
        for name, part in self._parts.items():
            yield from self._ask(name, lambda part=part: list(part(dump)), [])  # type: ignore[misc]
        yield counter("scrape_errors", "Parts that raised when they were asked", ("part",), dict(self._errors))

    def _ask(self, name: str, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except Exception:
            self._errors[name] += 1
            if self._errors[name] == 1:
                logger.exception("the metrics of %s cannot be read; further failures of it are only counted", name)
            return otherwise


def worker_parts(
    *,
    manager: KVCacheManager,
    figures: TransferFigures,
    plan: Plan | None = None,
    registry: Registry | None = None,
) -> dict[str, Part]:
    """Name the parts that every engine has; add its own, and make a ``WorkerCollector`` of them.

    Args:
        manager: of the worker.
        figures: that ``build`` was given ``count`` of, as ``on_event``.
        plan: what they were built from.
        registry: of the plugins.
    """
    found: dict[str, Part] = {
        "transceiver": parts.of_transceiver,
        "ledger": parts.of_ledger,
        "transfers": lambda dump: parts.of_transfers(figures),
        "cache": lambda dump: parts.of_cache(manager),
    }
    if plan is not None:
        found["worker"] = lambda dump: parts.of_worker(plan, dump)
        found["plan"] = lambda dump: parts.of_plan(plan)
    if registry is not None:
        found["plugins"] = lambda dump: parts.of_plugins(registry)
    return found


def metrics_registry(collector: WorkerCollector) -> CollectorRegistry:
    """A registry of its own, so that a process may have several workers; the process's figures are in it too."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
