"""The suite for managers finds each fault that is planted in one, at the right check, and says which it is."""

from pathlib import Path

import pytest
from conformance.bad_manager import FAULTS
from conformance.planted import run_suites

EXPECTED = {
    "hands out its table": (
        "test_a_table_is_a_copy_with_each_block_once",
        "whoever changes a table changes the manager's",
    ),
    "leaks when full": ("test_running_out_tells_the_figures_and_changes_nothing", "needed, free, total are (4, 2, 8)"),
    "holds anything": ("test_only_what_is_in_use_is_held_and_only_what_is_held_released", "raised None, no ValueError"),
    "ignores the limit": ("test_reuse_stops_where_the_caller_says", "at most 7 tokens were to be reused, and 8 are"),
    "commits half a block": ("test_a_committed_prefix_is_shared", "ten tokens are two full blocks"),
    "frees held blocks": ("test_a_held_block_outlives_its_request", "'in_use': 0}, expected"),
    "forgives strangers": (
        "test_an_unknown_request_is_a_key_error[free]",
        "free of request 77, which is nowhere, raised None",
    ),
    "lies about its memory": ("test_the_views_of_a_layer_are_the_layouts_memory", "is not in its view"),
    "reuses always": ("test_without_reuse_nothing_is_shared", "enable_block_reuse is off, and 8 tokens are reused"),
    "evicts nothing": ("test_what_is_only_cached_makes_room", "six blocks are free and two only cached"),
}

SUITES = """
from conformance.bad_manager import DECLARED, FAULTS
from kvferry_plugins.testing.conformance import KVCacheManagerConformance
"""
SUITE = """
class Test_{number}(KVCacheManagerConformance):
    declared = DECLARED
    def make_manager(self, spec):
        return FAULTS[{fault!r}](spec)
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Fault → test → why it failed."""
    folder = tmp_path_factory.mktemp("bad_managers")
    text = SUITES + "".join(SUITE.format(number=number, fault=fault) for number, fault in enumerate(FAULTS))
    (folder / "test_bad.py").write_text(text)
    found = run_suites(folder, variables={"PYTHONPATH": str(Path(__file__).parents[1])})
    return {fault: found[f"Test_{number}"] for number, fault in enumerate(FAULTS)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(failures, fault):
    check, message = EXPECTED[fault]
    why = failures[fault][check]
    assert why is not None, f"{check} passed"
    assert message in why
