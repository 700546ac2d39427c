from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from faults.harness import Cast


@pytest.fixture
def cast() -> Iterator[Cast]:
    with ExitStack() as stack:
        yield Cast(stack)
