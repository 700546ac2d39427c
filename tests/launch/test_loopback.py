import socket
import subprocess
import sys

import pytest
from faults.listening import listeners

from kvferry.launch.loopback import keep_to_loopback

LISTEN = """
import socket, sys
sockets = [socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
sockets.append(socket.create_server(("::", 0), family=socket.AF_INET6)) if socket.has_dualstack_ipv6() else None
sockets[0].settimeout(20)
print(sockets[0].getsockname()[1], flush=True)
print(sockets[0].accept()[0].recv(5).decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listening():
    """A child that listens on every device."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LISTEN], stdin=pipe, stdout=pipe, text=True) as child:
        yield child, int(child.stdout.readline())


def test_what_listens_everywhere_is_reached_over_loopback_alone(listening):
    child, port = listening
    before = listeners(child.pid)
    assert not all(each.is_kept_to_loopback for each in before)
    forbidden = False
    try:
        keep_to_loopback(child.pid)
    except PermissionError:  # by a container
        forbidden = True
    after = listeners(child.pid)
    assert len(after) == len(before)
    assert after == before if forbidden else all(each.is_kept_to_loopback for each in after)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(b"hello")
        assert child.stdout.readline() == "hello\n"


def test_who_has_ended_is_an_error():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    with pytest.raises(OSError, match="No such"):
        keep_to_loopback(child.pid)
