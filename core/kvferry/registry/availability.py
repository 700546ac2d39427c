"""Whether the libraries of a declaration are installed, told without importing them."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

_DISTRIBUTION = "distribution:"


def missing_modules(requires: Iterable[str]) -> tuple[str, ...]:
    """Name the top-level modules, and distributions, that cannot be found here; nothing is imported."""
    return tuple(name.removeprefix(_DISTRIBUTION) for name in requires if not is_installed(name))


def is_installed(name: str) -> bool:
    """Tell whether a module can be found, by its top-level package alone; or the distribution in ``distribution:X``."""
    try:
        if name.startswith(_DISTRIBUTION):
            return bool(distribution(name.removeprefix(_DISTRIBUTION)))
        return find_spec(name.partition(".")[0]) is not None
    except (PackageNotFoundError, ImportError, ValueError):
        return False
