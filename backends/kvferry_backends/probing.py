"""What a backend's probe finds out about its library without loading it."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def library_findings(module: str, *, distributions: Iterable[str]) -> dict[str, object]:
    """Tell whether a top-level module is installed, where, and in which versions its distributions are."""
    spec = find_spec(module)
    return {
        "installed": spec is not None,
        "location": spec.origin if spec else None,
        "versions": {name: found for name in distributions if (found := _version(name)) is not None},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
