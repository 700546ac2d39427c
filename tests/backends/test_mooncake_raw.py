import json
import subprocess
import sys

import pytest

COMMANDS = [
    {"command": "write"},
    {"command": "write_one_block"},
    {"command": "write_pieces", "pieces": 64},
    {"command": "write_pieces", "pieces": 4096, "seed": 3},
]


@pytest.fixture
def raw():
    module = "kvferry_backends.mooncake_raw"
    arguments = [sys.executable, "-m", module, "--bytes", str(4 << 20), "--block-bytes", "65536"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_it_times_each_way_on_command_and_ends_with_its_input(raw):
    ways = json.loads(raw.stdout.readline())["ways"]
    assert ways == ["one piece", "64 pieces"]
    for way in ways:
        for command in COMMANDS:
            raw.stdin.write(json.dumps({**command, "way": way}) + "\n")
            raw.stdin.flush()
            assert 0 < json.loads(raw.stdout.readline())["seconds"] < 5
    raw.stdin.close()
    assert raw.wait(20) == 0
