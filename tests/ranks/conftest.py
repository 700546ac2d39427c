from collections.abc import Iterator

import pytest
from ranks.worlds import PAIRINGS, Processes


@pytest.fixture(scope="session", params=PAIRINGS, ids=str)
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """The processes of one pairing: what one has loaded, no other may load."""
    settings = str(tmp_path_factory.mktemp("settings"))
    made = Processes(request.param, {"XDG_CONFIG_HOME": settings, "XDG_STATE_HOME": settings})
    yield made
    made.close()
