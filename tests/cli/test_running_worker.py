import contextlib
import json
import socket
import threading
import time

import pytest
from click.testing import CliRunner

from kvferry.cli import bounded_fetch
from kvferry.cli.main import main


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:22x",
        "127.0.0.1:99999",
        "127.0.0.1:0",
        "https://127.0.0.1:1",
        "http://",
        "http://[::1",
        "http://a..b:1",
        "127.0.0.1:1/a b",
    ],
)
def test_what_is_no_address_is_wrong_input(address):
    result = CliRunner().invoke(main, ["explain", "--worker", address])
    assert result.exit_code == 2
    assert f"--worker {address!r} is no http://HOST:PORT" in result.stderr


def test_where_nobody_answers_is_said(unused_port):
    result = CliRunner().invoke(main, ["explain", "--worker", f"127.0.0.1:{unused_port}"])
    assert result.exit_code == 1
    assert f"no worker answers at http://127.0.0.1:{unused_port}/status" in result.stderr


@pytest.fixture
def unused_port():
    with socket.socket() as taken:  # bound, and never listening: nobody else gets it meanwhile
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "it answers 503 Busy"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "it answers 302 Found"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 200_000, "RecursionError"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 4096, "its answer has more than"),
        (b"SSH-2.0-OpenSSH\r\n", "BadStatusLine"),
    ],
    ids=["status", "elsewhere", "nested", "megabytes", "another protocol"],
)
def test_what_is_no_worker_is_said(stranger, monkeypatch, answer, told):
    if told.endswith("more than"):
        monkeypatch.setattr(bounded_fetch, "MOST_BYTES", 1024)
    address = stranger(lambda connection: connection.sendall(answer))
    result = CliRunner().invoke(main, ["explain", "--worker", address])
    assert result.exit_code == 1
    assert f"what answers at http://{address}/status is no kvferry worker" in result.stderr
    assert told in result.stderr
    assert len(result.stderr) < 500


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=str)
def test_an_answer_that_never_ends_ends(stranger, monkeypatch, first):
    monkeypatch.setattr(bounded_fetch, "WHOLE_SECONDS", 0.5)

    def drip(connection):
        connection.sendall(first)
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.05)

    result = CliRunner().invoke(main, ["explain", "--worker", stranger(drip)])
    assert result.exit_code == 1
    assert "its answer is not whole after 0.5 s" in result.stderr


@pytest.fixture
def stranger():
    """Serve one connection at an address in one's own words."""
    with contextlib.ExitStack() as undo:

        def serve(say):
            listening = undo.enter_context(socket.create_server(("127.0.0.1", 0)))

            def answer():
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    say(connection)

            thread = threading.Thread(target=answer)
            thread.start()
            undo.callback(thread.join, 30)
            return f"127.0.0.1:{listening.getsockname()[1]}"

        yield serve


@pytest.mark.parametrize(
    ("verb", "status"),
    [
        (["explain", "--worker"], {"plan": {"decisions": 3}, "transceiver": {}, "plugins": {}}),
        (["explain", "--json", "--worker"], {"plan": {"decisions": []}, "transceiver": {}, "plugins": {}}),
        (
            ["plugins", "list", "--worker"],
            {"plan": {"decisions": []}, "transceiver": {}, "plugins": {}, "plugin_records": [1]},
        ),
    ],
    ids=["explain", "explain as JSON", "plugins list"],
)
def test_a_worker_of_which_nothing_can_be_made_is_named(stranger, verb, status):
    text = json.dumps(status).encode()
    address = stranger(lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + text))
    result = CliRunner().invoke(main, [*verb, address])
    assert result.exit_code == 1
    assert f"the worker at {address} describes itself as no version does that this kvferry knows" in result.output
