import pytest
from faults.deaths import kill_and_survive
from faults.harness import ROLES, Cast, over_tcp


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize("victim", ROLES)
def test_a_worker_survives_the_death_of_its_peer(cast: Cast, victim: str, moment: str) -> None:
    kill_and_survive(cast, victim, moment)


@over_tcp
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ROLES)
def test_a_worker_survives_the_death_of_its_peer_whose_bytes_are_in_a_socket(cast: Cast, victim: str) -> None:
    kill_and_survive(cast, victim, "during")
