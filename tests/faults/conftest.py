from collections.abc import Iterator

import pytest
from faults.harness import PAIRINGS, ROLES, Cast


@pytest.fixture(scope="session", params=PAIRINGS, ids=str)
def company(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    """Of every pairing the workers that outlive a test."""
    cast = Cast(dict.fromkeys(ROLES, request.param), tmp_path_factory.mktemp("settings"))
    yield cast
    cast.close()


@pytest.fixture
def cast(company: Cast) -> Iterator[Cast]:
    with company.act():
        yield company
