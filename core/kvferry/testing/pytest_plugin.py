"""The pytest plugin: fixtures for harnesses; imports nothing of kvferry until one is used."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.registry.door import Registry


@pytest.fixture
def kvferry_registry() -> "Callable[..., Registry]":
    """``isolated_registry``: call it with the plugins to inject."""
    from kvferry.testing import isolated_registry

    return isolated_registry
