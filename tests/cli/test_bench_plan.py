import json
import sys

import pytest
from click.testing import CliRunner

from kvferry.cli.main import main


def run(*arguments):
    result = CliRunner().invoke(main, ["bench", "plan", "--rounds", "1", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def plans(*arguments):
    return json.loads(run(*arguments, "--json"))["plans"]


def test_each_planner_plans_both_orders_into_as_many_segments():
    found = {(each["planner"], each["order"]): each for each in plans("--blocks", "64")}
    orders = ("in order", "shuffled", "shuffled, half the heads")
    assert set(found) == {(planner, order) for planner in ("PYTHON", "CPP") for order in orders}
    assert found["CPP", "in order"]["segments"] == 1
    assert found["CPP", "shuffled"]["segments"] == found["PYTHON", "shuffled"]["segments"] > 1
    assert {found[planner, orders[2]]["segments"] for planner in ("PYTHON", "CPP")} == {64 * 32 * 2}
    assert all(each["microseconds_a_block"] > 0 for each in found.values())


def test_memory_is_linear_and_at_most_200_bytes_a_block():
    for each in plans("--blocks", "40000", "--blocks", "80000"):
        if each["planner"] == "PYTHON":  # counted; what the process grew by is not the same each time
            assert 0 < each["bytes_a_block"] <= 200


def test_without_the_engine_python_alone_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvferry_native", None)
    assert {each["planner"] for each in plans("--blocks", "16")} == {"PYTHON"}


@pytest.mark.parametrize("blocks", ["16", "32"])
def test_the_table_names_every_figure(blocks):
    printed = run("--blocks", blocks)
    assert "bytes a block" in printed
    assert blocks in printed
