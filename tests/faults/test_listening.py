import ipaddress

import psutil
import pytest
from faults.harness import Cast, hand_over


@pytest.mark.parametrize("role", ["context", "generation"])
def test_a_worker_without_configured_peers_listens_on_loopback_alone(cast: Cast, role: str) -> None:
    workers = {name: cast.lasting(name) for name in ("context", "generation")}
    workers["generation"].ask("free", request=hand_over(cast, workers["context"], workers["generation"]))
    connections = psutil.Process(workers[role].process.pid).net_connections(kind="inet")
    listening = [connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN]
    assert listening
    assert all(ipaddress.ip_address(address).is_loopback for address in listening), listening
