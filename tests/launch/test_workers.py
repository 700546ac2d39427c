import sys

import pytest

from kvferry.bench.processes import ChildError, ChildOrder, start_together
from kvferry.demo.processes import WorkerFailedError, WorkerProcess, started

READY = 'print(\'{"ready": true, "http": "http://127.0.0.1:1"}\', flush=True); import time; time.sleep(60)'
WAITS = "import time; time.sleep(60)"
FAILS = 'print(\'{"errors": [{"message": "no such model"}]}\'); raise SystemExit(2)'


class Pretender(WorkerProcess):
    """A worker that runs ``arguments`` as Python instead."""

    @property
    def command(self):
        return [sys.executable, "-c", *self.arguments]


def pair(context, generation):
    programs = {"context": context, "generation": generation}
    return [Pretender(name, (program,), lambda text: None) for name, program in programs.items()]


def test_workers_of_one_world_are_ready_and_end_as_others_do(launcher):
    workers = pair(READY, READY)
    with started(workers, launcher) as wait_ready:
        wait_ready()
        assert all(worker.http for worker in workers)


def test_the_worker_that_failed_is_blamed_and_not_the_one_that_waited_for_it(launcher):
    with started(pair(WAITS, FAILS), launcher) as wait_ready, pytest.raises(WorkerFailedError) as failure:
        wait_ready()
    assert str(failure.value) == "the generation worker cannot start: no such model"


def test_a_child_whose_mate_failed_says_who_it_was(launcher, tmp_path, monkeypatch):
    (tmp_path / "waiting.py").write_text("import sys; sys.stdin.read()")
    (tmp_path / "failing.py").write_text("raise SystemExit('no world for me')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    orders = [ChildOrder(name, (), f"{name} child") for name in ("waiting", "failing")]
    said = "first failing child ended with status 1: no world for me"
    with pytest.raises(ChildError, match=said), start_together(launcher, orders) as (waiting, _):
        waiting.answer(timeout=30)
