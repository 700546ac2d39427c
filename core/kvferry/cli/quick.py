"""Keeps a short verb short: it imports much, ends at once, and has no garbage worth looking for."""

import atexit
import functools
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PYDANTIC = "PYDANTIC_DISABLE_PLUGINS"


def quick(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a verb that answers and ends.

    Measured on ``explain``, of 210 ms: collecting no garbage while it runs saves 11, nor when the process ends 26,
    and not looking through all distributions for plugins of pydantic's saves 7.
    """

    @functools.wraps(function)
    def hurried(*args: P.args, **kwargs: P.kwargs) -> T:
        atexit.register(gc.freeze)
        with _no_garbage_collection(), _no_plugins_of_pydantic():
            return function(*args, **kwargs)

    return hurried


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _no_plugins_of_pydantic() -> Iterator[None]:
    """Pydantic looks for its plugins when the first model is made, which is in here."""
    before = os.environ.get(_PYDANTIC)
    os.environ[_PYDANTIC] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PYDANTIC]
        else:
            os.environ[_PYDANTIC] = before
