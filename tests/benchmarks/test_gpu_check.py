import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
SMALL = ["--blocks", "20", "--big-mib", "4", "--rounds", "1"]

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so it would be measured")


def run(*arguments, **variables):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize("transport", ["NIXL", "UCX"])
def test_a_rehearsal_on_cpu_memory_moves_all_blocks_by_value_and_every_way(transport):
    done = run("--device", "cpu", "--transport", transport, *SMALL, "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout)
    (found,) = outcome["transports"]
    assert (outcome["ok"], outcome["device"], found["error"]) == (True, "cpu", None)
    assert [row["blocks"] for row in found["rows"]] == [1, 4, 16, 20, 64]
    assert {row["wrong_blocks"] for row in found["rows"]} == {0}
    for row in found["rows"][:-1]:
        rates = row["gigabytes_per_second"]
        assert set(rates) == {"copy", "consecutive", "scattered", "gathered"}
        assert row["taken"] == max(("scattered", "gathered"), key=rates.get)
    assert set(found["rows"][-1]["seconds"]) == {"copy", "consecutive"}


def test_the_table_is_for_people():
    done = run("--device", "cpu", "--transport", "UCX", "--blocks", "1", "--big-mib", "1", "--rounds", "1")

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("UCX under CPP (ucx 1.")
    assert lines[-1] == "all bytes right"


@without_gpu
def test_it_says_plainly_that_there_is_no_gpu_and_why():
    done = run()

    assert done.returncode == 0
    assert done.stdout.startswith("no GPU here: torch ")
    assert done.stdout.count("\n") == 1
    assert json.loads(run("--json").stdout)["skipped"] == done.stdout.strip()


@without_gpu
def test_a_gpu_that_was_asked_for_and_is_not_there_is_wrong_input():
    done = run("--device", "cuda:0")

    assert done.returncode == 2
    assert done.stderr.startswith("--device cuda:0 cannot be had: torch ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "gpu"], "is none of auto, cpu, cuda, cuda:N"),
        (["--blocks", "0"], "start at 1"),
        (["--big-mib", "4096"], "2048 MiB is the most"),
        (["--transport", "MPI"], "invalid choice"),
    ],
)
def test_wrong_input_is_said_before_anything_starts(arguments, says):
    done = run(*arguments)

    assert done.returncode == 2
    assert says in done.stderr


def test_a_transport_that_does_not_start_is_a_finding_and_the_other_is_measured():
    done = run("--device", "cpu", *SMALL, "--json", UCX_TLS="posix,self")

    outcome = json.loads(done.stdout)
    assert done.returncode == 1
    assert "UCX_TLS='posix,self': add tcp" in outcome["transports"][0]["error"]
    assert outcome["transports"][1]["transport"] == "UCX"


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu_check

    yield gpu_check
    del sys.modules["gpu_check"]


@pytest.mark.parametrize(
    ("variables", "findings"),
    [
        ({}, []),
        ({"UCX_TLS": "all"}, []),
        ({"UCX_TLS": "tcp,cuda_copy,cuda_ipc"}, []),
        ({"UCX_TLS": "^ib"}, []),
        ({"UCX_TLS": "tcp,self"}, ["UCX_TLS='tcp,self' leaves out"]),
        ({"UCX_TLS": "^cuda_ipc"}, ["UCX_TLS='^cuda_ipc' leaves out"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["PYTORCH_CUDA_ALLOC_CONF asks for"]),
    ],
)
def test_what_keeps_ucx_from_device_memory_is_found_in_the_environment(gpu_check, variables, findings):
    said = list(gpu_check.obstacles(variables))

    assert len(said) == len(findings)
    assert all(text.startswith(start) for text, start in zip(said, findings, strict=True))


def test_blocks_that_are_wrong_or_not_meant_are_counted(gpu_check):
    side = gpu_check._Side.__new__(gpu_check._Side)
    side.torch, side.device = torch, "cpu"
    side.pool = torch.full((8, gpu_check.WORDS), gpu_check.POISON, dtype=torch.int32)
    src, dst = torch.tensor([1, 5, 2]).numpy(), torch.tensor([7, 0, 3]).numpy()
    side.pool[torch.from_numpy(dst)] = side.pattern(src)
    assert side.wrong(src, dst) == 0

    side.pool[7, 99] += 1
    assert side.wrong(src, dst) == 1
    side.pool[4, 0] = 5
    assert side.wrong(src, dst) == 2
    side.pool[0] = gpu_check.POISON
    assert side.wrong(src, dst) >= 2


def test_bytes_that_go_by_the_host_are_noticed(gpu_check):
    def found(consecutive):
        rates = {"copy": 1000.0, "consecutive": consecutive}
        return {"transport": "NIXL", "error": None, "rows": [{"gigabytes_per_second": rates}]}

    assert gpu_check.slow(found(900.0)) is None
    assert "NIXL moves at 0.001 of a copy" in gpu_check.slow(found(1.0))
