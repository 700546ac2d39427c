import socket
import subprocess
import sys
import time

import pytest

from kvferry_backends.orphaned_bytes import orphaned_bytes

SENDER = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.setblocking(False)
try:
    while True:
        connection.send(bytes(1 << 20))
except BlockingIOError:
    print("full", flush=True)
input()
"""


@pytest.fixture
def sender():
    """A process that has sent as much as fits, and our end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with subprocess.Popen(
            [sys.executable, "-c", SENDER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            connection, _ = server.accept()
            assert process.stdout.readline() == b"full\n"
            with connection:
                yield process, connection
            process.kill()


def orphaned(connection):
    """Of this connection alone: other tests' peers may have left bytes to this process too."""
    port = f":{connection.getsockname()[1]:04X} "
    return [nbytes for name, nbytes in orphaned_bytes().items() if port in name]


def test_bytes_of_a_living_sender_are_not_orphaned(sender):
    _, connection = sender
    assert orphaned(connection) == []


def test_bytes_of_a_dead_sender_count_until_the_last_is_read(sender):
    process, connection = sender
    process.kill()
    process.wait()
    (remaining,) = orphaned(connection)
    received = 0
    while chunk := _receive(connection):
        received += len(chunk)
    assert 1 << 16 < received <= remaining  # what is received and not yet acknowledged counts on both sides
    assert orphaned(connection) == []


def test_the_count_falls_while_they_are_read(sender):
    process, connection = sender
    process.kill()
    process.wait()
    (before,) = orphaned(connection)
    for _ in range(4):
        connection.recv(1 << 16)
    time.sleep(0.05)
    (after,) = orphaned(connection)
    assert 0 < after < before


def _receive(connection):
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""
