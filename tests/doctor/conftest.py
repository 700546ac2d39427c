import pytest

from kvferry.doctor.deployment import Machine


@pytest.fixture
def machine():
    """A machine with two network devices, no InfiniBand and no GPU."""
    return Machine(network_devices=frozenset({"eth0", "lo"}))
