"""What a call raised, as a value: a check that names what came instead reads better than ``pytest.raises``."""

from collections.abc import Callable
from typing import Any


def raised_by(function: Callable[..., object], *positional: Any, **by_name: Any) -> Exception | None:
    """Return the exception that a call raised, or None."""
    try:
        function(*positional, **by_name)
    except Exception as error:
        return error
    return None
