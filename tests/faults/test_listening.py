import pytest
from faults.harness import ROLES, Cast, hand_over
from faults.listening import listeners


@pytest.mark.parametrize("role", ROLES)
def test_a_worker_without_configured_peers_can_be_reached_over_loopback_alone(cast: Cast, role: str) -> None:
    workers = {name: cast.lasting(name) for name in ROLES}
    workers["generation"].ask("free", request=hand_over(cast, workers["context"], workers["generation"]))
    listening = listeners(workers[role].process.pid)
    assert listening
    assert all(listener.is_kept_to_loopback for listener in listening), listening
