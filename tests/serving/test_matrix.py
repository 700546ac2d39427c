"""Every combination that is declared gives what transformers itself gives, token for token."""

import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

HOST = Path(__file__).parent / "matrix_host.py"
SECONDS = 600
BACKENDS = {"PYTHON": "NIXL", "CPP": "UCX"}
CELLS = [
    *itertools.product(
        ("smollm2", "gemma3"),
        ("V1", "V2"),
        ("reuse", "no reuse"),
        ("context_first", "generation_first"),
        ("pipelined", "whole"),
        ("PYTHON", "CPP"),
    ),
    *(("gemma3", "V1-V2", "reuse", "generation_first", "pipelined", runtime) for runtime in BACKENDS),
    *(
        (*cell, runtime)
        for cell in (
            ("tiny:deepseek_v3", "V2", "reuse", "generation_first", "pipelined"),
            ("tiny:gpt_oss", "V2", "reuse", "generation_first", "pipelined"),
            ("tiny:gpt_oss", "V1", "reuse", "context_first", "whole"),
            ("tiny:kimi_linear", "V2", "no reuse", "context_first", "whole"),
            ("tiny:qwen3_next", "V2", "no reuse", "generation_first", "pipelined"),
        )
        for runtime in BACKENDS
    ),
]


class Host:
    """The process that runs one runtime's cells, in the order in which they are given; all are given at once."""

    def __init__(self, cells: list[tuple[str, ...]]) -> None:
        self._results: dict[tuple[str, ...], dict] = {}
        self._news = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, str(HOST)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        self._reader = threading.Thread(target=self._read, args=(cells,), daemon=True)
        self._reader.start()

    def _read(self, cells):
        self._process.stdin.write("".join(f"{json.dumps(as_told(cell))}\n" for cell in cells))
        self._process.stdin.close()
        for cell, line in zip(cells, self._process.stdout, strict=False):
            with self._news:
                self._results[cell] = json.loads(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def result(self, cell: tuple[str, ...]) -> dict:
        with self._news:
            assert self._news.wait_for(lambda: cell in self._results or self._ended, SECONDS)
            assert cell in self._results, "the host ended"
            return self._results[cell]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(10)
        self._process.stdout.close()


def as_told(cell: tuple[str, ...]) -> dict:
    model, manager, reuse, style, pipelined, runtime = cell
    return {
        "model": model,
        "manager": manager,
        "reuse": reuse == "reuse",
        "style": style,
        "pipelined": pipelined == "pipelined",
        "runtime": runtime,
        "backend": BACKENDS[runtime],
    }


@pytest.fixture(scope="module")
def hosts(request):
    """A process a runtime; both run at the same time."""
    asked = [item.callspec.params["cell"] for item in request.session.items if item.path == request.node.path]
    hosts = {runtime: Host(cells) for runtime in BACKENDS if (cells := [cell for cell in asked if cell[-1] == runtime])}
    yield hosts
    for host in hosts.values():
        host.stop()


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_the_output_equals_transformers(hosts, cell):
    result = hosts[cell[-1]].result(cell)
    assert "error" not in result, result["error"]
    assert (result["manager"], result["runtime"]) == (cell[1].split("-")[-1], cell[-1])
    for answer in result["answers"]:
        assert answer["token_ids"] == answer["reference"]
        assert answer["bytes"] == answer["expected_bytes"]
    first, *second = result["answers"]
    assert first["cached_tokens"] == 0
    assert len(second) == (cell[2] == "reuse")
    for answer in second:
        assert answer["cached_tokens"] >= first["prompt_tokens"] - 40
        assert answer["bytes"] < first["bytes"] / 4
