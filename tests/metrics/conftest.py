import math

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text


class Scraped:
    """The samples of one scrape: ``scraped("transfers_total", role="context")``."""

    def __init__(self, text, read=read_text):
        self.families = {family.name: family for family in read(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def rows(self, name, **labels):
        wanted = labels.items()
        return [each for each in self.samples if each.name == f"kvferry_{name}" and wanted <= each.labels.items()]

    def __call__(self, name, **labels):
        """The sum over all samples of that name that have these labels."""
        return math.fsum(each.value for each in self.rows(name, **labels))

    def labels(self, name, label):
        return {each.labels[label] for each in self.rows(name)}


@pytest.fixture
def read_metrics():
    """Read a scrape: ``read_metrics(text)``, or ``read_metrics(text, openmetrics=True)``."""
    return lambda text, *, openmetrics=False: Scraped(text, read_openmetrics if openmetrics else read_text)
