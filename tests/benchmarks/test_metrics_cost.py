import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "metrics_cost.py"


@pytest.fixture(scope="module")
def metrics_cost():
    spec = importlib.util.spec_from_file_location("metrics_cost", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ratios_are_taken_within_a_round(metrics_cost):
    slow, fast = [(2.0, 0.2), (20.0, 2.0), (4.0, 0.4)], [(1.0, 0.1), (10.0, 1.0), (2.0, 0.2)]
    assert metrics_cost._ratio(slow, fast) == {"request": [2.0, 2.0, 2.0], "handoff": [2.0, 2.0, 2.0]}


def test_another_source_tree_is_on_the_path_only_while_its_workers_start(metrics_cost, monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with metrics_cost._path_of(tmp_path):
        assert metrics_cost.os.environ["PYTHONPATH"].split(":")[0] == str(tmp_path / "core")
    assert "PYTHONPATH" not in metrics_cost.os.environ
