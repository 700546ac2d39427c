"""Whether the libraries of a declaration are installed, told without importing them."""

from collections.abc import Iterable
from importlib.util import find_spec


def missing_modules(requires: Iterable[str]) -> tuple[str, ...]:
    """Name the top-level modules that cannot be found here; nothing is imported."""
    return tuple(name for name in requires if not is_installed(name))


def is_installed(module: str) -> bool:
    """Tell whether a module can be found, by its top-level package alone."""
    try:
        return find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
