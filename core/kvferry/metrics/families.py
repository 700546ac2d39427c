"""Families of samples, as ``prometheus_client`` takes them, from plain mappings of label values to figures."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kvferry.metrics.figures import BUCKETS, Histogram

PREFIX = "kvferry_"

MAX_LABEL_CHARACTERS = 80

Samples = Mapping[Any, float]
"""Figures by the values of their labels, a tuple; a lone one may be written without."""


def gauge(name: str, help_text: str, labels: Iterable[str], samples: Samples) -> Metric:
    """A figure that goes up and down."""
    family = GaugeMetricFamily(PREFIX + name, help_text, labels=tuple(labels))
    for values, figure in samples.items():
        family.add_metric(_texts(values), figure)
    return family


def counter(name: str, help_text: str, labels: Iterable[str], samples: Samples) -> Metric:
    """A figure that only grows; its samples end in ``_total``."""
    family = CounterMetricFamily(PREFIX + name, help_text, labels=tuple(labels))
    for values, figure in samples.items():
        family.add_metric(_texts(values), figure)
    return family


def histogram(name: str, help_text: str, labels: Iterable[str], samples: Mapping[Any, Histogram]) -> Metric:
    """Seconds by bucket."""
    family = HistogramMetricFamily(PREFIX + name, help_text, labels=tuple(labels))
    bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
    for values, figures in samples.items():
        buckets = [(bound, float(count)) for bound, count in zip(bounds, accumulate(figures.counts), strict=True)]
        family.add_metric(_texts(values), buckets, sum_value=figures.total)
    return family


def info(name: str, help_text: str, rows: Iterable[Mapping[str, object]]) -> Metric:
    """Facts, as labels of a sample that is 1; its name ends in ``_info``."""
    family = InfoMetricFamily(PREFIX + name, help_text)
    for row in rows:
        family.add_metric([], {key: text(value) for key, value in row.items()})
    return family


def text(value: object) -> str:
    """A label's value: short, whatever it is told."""
    written = "" if value is None else str(value)
    return written if len(written) <= MAX_LABEL_CHARACTERS else f"{written[: MAX_LABEL_CHARACTERS - 1]}…"


def _texts(values: str | tuple[object, ...]) -> list[str]:
    return [text(value) for value in ((values,) if isinstance(values, str) else values)]
