import pytest
from click.testing import CliRunner

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
    import socket

    with socket.socket() as taken:  # bound, and never listening: nobody else gets it meanwhile
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
