"""All parts of one worker behind one collector, which reads them when it is scraped and costs nothing else."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvferry.metrics import parts
from kvferry.metrics.families import counter
from kvferry.metrics.figures import TransferFigures
from kvferry.registry.door import Registry
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.transceiver import KvCacheTransceiver
from kvferry_plugins.types import Plan

logger = logging.getLogger("kvferry.metrics")

Part = Callable[[], Iterable[Metric]]


class WorkerCollector(Collector):
    """Asks each part at a scrape; one that raises is left out, counted, and logged the first time.

    Args:
        parts: by name.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = dict(parts)
        self._errors: Counter[str] = Counter(dict.fromkeys(parts, 0))

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        for name, part in self._parts.items():
            yield from self._ask(name, part)
        yield counter("scrape_errors", "Parts that raised when they were asked", ("part",), dict(self._errors))

    def _ask(self, name: str, part: Part) -> list[Metric]:
        try:
            return list(part())
        except Exception:
            self._errors[name] += 1
            if self._errors[name] == 1:
                logger.exception("the metrics of %s cannot be read; further failures of it are only counted", name)
            return []


def worker_parts(
    *,
    transceiver: KvCacheTransceiver,
    manager: KVCacheManager,
    figures: TransferFigures,
    plan: Plan | None = None,
    registry: Registry | None = None,
) -> dict[str, Part]:
    """Name the parts that every engine has; add its own, and make a ``WorkerCollector`` of them.

    Args:
        transceiver: asked for one ``status_dump`` a part.
        manager: of the same worker.
        figures: that ``build`` was given ``count`` of, as ``on_event``.
        plan: what they were built from.
        registry: of the plugins.
    """
    found: dict[str, Part] = {
        "transceiver": lambda: parts.of_transceiver(transceiver.status_dump()),
        "ledger": lambda: parts.of_ledger(transceiver.status_dump()),
        "transfers": lambda: parts.of_transfers(figures),
        "cache": lambda: parts.of_cache(manager),
    }
    if plan is not None:
        found["worker"] = lambda: parts.of_worker(plan, transceiver.status_dump())
        found["plan"] = lambda: parts.of_plan(plan)
    if registry is not None:
        found["plugins"] = lambda: parts.of_plugins(registry)
    return found


def metrics_registry(collector: WorkerCollector) -> CollectorRegistry:
    """A registry of its own, so that a process may have several workers; the process's figures are in it too."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry
