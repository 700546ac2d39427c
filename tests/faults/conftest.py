from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.harness import PAIRINGS, ROLES, Cast

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring together what has the same workers: pytest itself does so within a file."""
    places = [index for index, item in enumerate(items) if "company" in _params(item) and FOLDER in item.path.parents]
    ours = sorted((items[index] for index in places), key=lambda item: str(_params(item)["company"]))
    for index, item in zip(places, ours, strict=True):
        items[index] = item


def _params(item: pytest.Item) -> dict[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


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
