"""What doctor has found, as plain data."""

import enum
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace


class Severity(enum.StrEnum):
    """How much a finding matters; the first is the worst."""

    ERROR = "error"
    """Something does not work."""
    WARNING = "warning"
    """It works, and probably not as it was meant."""
    INFO = "info"
    """Good to know."""
    OK = "ok"
    """Looked at, and fine."""


class Area(enum.StrEnum):
    """Where it was found; the order is that of a report."""

    BACKENDS = "backends"
    PLUGINS = "plugins"
    CONFIGURATION = "configuration"
    ENVIRONMENT = "environment"
    LIBRARIES = "libraries"
    FILES = "files"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    area: Area
    severity: Severity
    subject: str
    """What it is about: a backend, plugin, variable, setting, file or worker."""
    what: str
    """Lower case, no full stop; reads on from the subject."""
    cause: str = ""
    fix: str = ""
    """What to do."""
    plugin: str | None = None
    """The plugin that it is about, or that brings what it is about."""
    distribution: str | None = None
    """That plugin's, as printed: ``acme-kvferry 1.0``."""

    def __str__(self) -> str:
        """One paragraph."""
        rest = "".join(f"; {part}" for part in (self.cause, self.fix) if part)
        return f"{self.subject}: {self.what}{rest}"


def count(findings: Iterable[Finding]) -> dict[Severity, int]:
    """Count findings by severity, those that are not there too."""
    listed = [finding.severity for finding in findings]
    return {severity: listed.count(severity) for severity in Severity}


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort for a report: by area, the worst first; what is there twice stays once."""
    areas, severities = list(Area), list(Severity)
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda each: (areas.index(each.area), severities.index(each.severity), each.subject))


def together(findings: Iterable[Finding]) -> list[Finding]:
    """Join what several subjects have alike into one finding about all of them, where the first one stood."""
    alike: dict[Finding, list[Finding]] = defaultdict(list)
    for finding in findings:
        alike[replace(finding, subject="", plugin=None)].append(finding)
    return [replace(same[0], subject=", ".join(each.subject for each in same)) for same in alike.values()]
