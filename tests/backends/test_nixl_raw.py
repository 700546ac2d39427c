import json
import subprocess
import sys

import pytest

COMMANDS = [
    {"command": "write"},
    {"command": "write_one_block"},
    {"command": "write_pieces", "pieces": 64},
    {"command": "write_pieces", "pieces": 64, "seed": 3},
]


@pytest.fixture
def raw():
    arguments = [sys.executable, "-m", "kvferry_backends.nixl_raw", "--bytes", str(4 << 20), "--block-bytes", "65536"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_it_times_each_way_on_command_and_ends_with_its_input(raw):
    ways = json.loads(raw.stdout.readline())["ways"]
    assert ways == ["progress thread", "polled"]
    for way in ways:
        for command in COMMANDS:
            assert 0 < _ask(raw, {**command, "way": way})["seconds"] < 5
    raw.stdin.close()
    assert raw.wait(20) == 0


def test_its_stopped_processes_do_not_outlive_it(raw):
    assert json.loads(raw.stdout.readline())["ways"]
    children = _children(raw.pid)
    assert len(children) >= 4
    raw.kill()
    raw.wait()
    while any(_is_running(child) for child in children):
        pass


def _ask(process, command):
    process.stdin.write(json.dumps(command) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def _is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
