import json
import subprocess
import sys

import pytest

WAYS = {
    "kvferry_backends.nixl_raw": ["progress thread", "polled"],
    "kvferry_backends.ucx_raw": ["spinning target", "napping target"],
    "kvferry_backends.mpi_raw": ["Put", "Send/Recv"],
    "kvferry_backends.mooncake_raw": ["one piece", "64 pieces"],
}
COMMANDS = [
    {"command": "write"},
    {"command": "write_one_block"},
    {"command": "write_pieces", "pieces": 64},
    {"command": "write_pieces", "pieces": 64, "seed": 3},
    {"command": "write_pieces", "pieces": 64, "seed": None},
]


@pytest.fixture(params=WAYS)
def module(request):
    return request.param


@pytest.fixture
def raw(module):
    arguments = [sys.executable, "-m", module, "--bytes", str(4 << 20), "--block-bytes", "65536"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_it_times_each_way_on_command_and_ends_with_its_input(raw, module):
    ways = json.loads(raw.stdout.readline())["ways"]
    assert ways == WAYS[module]
    for way in ways:
        for command in COMMANDS:
            assert 0 < _ask(raw, {**command, "way": way})["seconds"] < 5
    raw.stdin.close()
    assert raw.wait(20) == 0


def test_its_stopped_processes_do_not_outlive_it(raw):
    assert json.loads(raw.stdout.readline())["ways"]
    below = _descendants(raw.pid)
    assert len(below) >= 2
    while [_state(process) for process in below].count("T") < 2:
        pass
    raw.kill()
    raw.wait()
    while any(_state(process) not in ("Z", None) for process in below):
        pass


@pytest.mark.parametrize("module", ["kvferry_backends.ucx_raw"])
def test_what_it_cannot_do_is_said_as_an_answer(raw):
    assert json.loads(raw.stdout.readline())["ways"]
    assert "'read'" in _ask(raw, {"command": "read", "way": "spinning target"})["error"]
    assert raw.wait(20) == 1


def _ask(process, command):
    process.stdin.write(json.dumps(command) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _descendants(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    return children + [each for child in children for each in _descendants(child)]


def _state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None
