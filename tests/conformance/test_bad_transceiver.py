"""The suite for transceivers finds each fault that is planted in one, at the right check, and says which it is."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conformance.bad_transceiver import FAULTS, Faithful
from conformance.planted import run_suites

from kvferry_plugins.forwarding import contract_members

EXPECTED = {
    "tells each end twice": ("test_each_end_is_told_once", "the generation status lists requests more than once"),
    "waits when it is only asked": ("test_asking_without_a_number_never_waits", "status with at_least=0 waits"),
    "does not wait when it is told to": (
        "test_asking_for_one_waits_for_it[generation]",
        "the generation status with at_least=1 does not wait for it",
    ),
    "waits for ever": (
        "test_asking_for_one_waits_at_most_the_poll_interval",
        "the context status waits for an end longer than its poll interval",
    ),
    "sends before it returns": (
        "test_neither_side_waits_for_its_peer",
        "respond_and_send_async of the context worker waits for it",
    ),
    "answers for all requests": (
        "test_neither_side_waits_for_its_peer",
        "request 77 is nowhere, and the context worker says that it is in flight",
    ),
    "keeps its reasons": (
        "test_the_context_workers_reason_reaches_the_other_side",
        "the context worker cancelled because 'the prefill ran out of luck', and the generation worker hears",
    ),
    "says complete before it is": ("test_nothing_is_complete_before_it_is", "although a write is in flight"),
    "gives blocks back too early": (
        "test_blocks_are_not_given_back_while_a_write_is_in_flight[generation]",
        "cancel_request of the generation worker says that its blocks may be freed",
    ),
    "hides failures": (
        "test_a_write_that_fails_fails_its_request_alone[failed]",
        "the context worker never told the end of request 1",
    ),
    "keeps holds": (
        "test_every_byte_arrives_and_no_other_is_touched[context]",
        "the context worker keeps blocks that nobody has: a hold leaks",
    ),
    "leaves a thread": ("test_nothing_is_left_of_workers_that_were_shut_down", "there is still: thread bad-heartbeat"),
    "ends only once": ("test_shutdown_is_idempotent_and_final", "the second shutdown of the context worker raised"),
    "declares other than it has": (
        "test_its_capabilities_are_those_that_its_plugin_declares",
        "the capabilities of the context transceiver differ in timing",
    ),
    "collects chunks": (
        "test_chunks_leave_before_the_last_one_is_computed_or_are_refused",
        "the first chunk did not arrive before the last was offered",
    ),
    "dumps objects": (
        "test_its_status_is_plain_json_at_any_time",
        "status_dump of the context before anything is no plain JSON: Object of type FakeManager",
    ),
    "says that memory is free": (
        "test_memory_that_a_peer_may_still_write_to_is_not_given_back",
        "memory_in_use says that the memory may be freed",
    ),
    "trusts anybody": (
        "test_parameters_that_are_wrong_are_refused_at_once[an endpoint that is no peer]",
        "parameters with an endpoint that is no peer raised None",
    ),
    "scribbles": (
        "test_every_byte_arrives_and_no_other_is_touched[context]",
        "bytes of other requests' blocks were written",
    ),
    "loses a block": (
        "test_every_byte_arrives_and_no_other_is_touched[context]",
        " of 7680 bytes of the prompt differ at the generation worker",
    ),
    "accepts after the end": (
        "test_shutdown_is_idempotent_and_final",
        "get_disaggregated_params of a transceiver that is shut down raised None",
    ),
}

SUITES = """
from conformance.bad_transceiver import FAULTS, RUNTIME, Faithful
from kvferry_plugins.testing.conformance import TransceiverConformance

class TestFaithful(TransceiverConformance):
    runtime = RUNTIME
    def make_transceiver(self, spec):
        return Faithful(spec)
"""
SUITE = """
class Test_{number}(TransceiverConformance):
    runtime = RUNTIME
    patience = 8.0
    def make_transceiver(self, spec):
        return FAULTS[{fault!r}](spec)
"""


BATCHES = 4
"""Runs at a time: most of their checks wait for what will not come."""


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Fault → test → why it failed: of each its check alone, and of the faithful wrapper the whole suite."""
    numbers = {fault: number for number, fault in enumerate(FAULTS)}
    text = SUITES + "".join(SUITE.format(number=number, fault=fault) for fault, number in numbers.items())
    names = ["TestFaithful", *(f"Test_{number}::{EXPECTED[fault][0]}" for fault, number in numbers.items())]

    def run(batch):
        folder = tmp_path_factory.mktemp("bad_transceivers")
        (folder / "test_bad.py").write_text(text)
        chosen = [f"test_bad.py::{name}" for name in names[batch::BATCHES]]
        return run_suites(folder, names=chosen, variables={"PYTHONPATH": str(Path(__file__).parents[1])})

    with ThreadPoolExecutor(BATCHES) as pool:
        found = {name: tests for batch in pool.map(run, range(BATCHES)) for name, tests in batch.items()}
    return {None: found["TestFaithful"], **{fault: found[f"Test_{number}"] for fault, number in numbers.items()}}


def test_a_wrapper_without_a_fault_passes(failures):
    assert len(failures[None]) > 25
    assert {name: why for name, why in failures[None].items() if why is not None} == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(failures, fault):
    check, message = EXPECTED[fault]
    why = failures[fault][check]
    assert why is not None, f"{check} passed"
    assert message in why


def test_the_faithful_wrapper_hands_on_the_whole_contract():
    inner = object.__new__(Faithful)
    assert contract_members(inner) <= {*vars(Faithful), "kv_transfer_timeout_ms"}
