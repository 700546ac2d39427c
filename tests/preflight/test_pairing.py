"""What only a pair shows: who reaches whom, whose clock is shorter, and what both can do."""

from dataclasses import replace

import pytest
from preflight.conftest import ON, WINDOWED

from kvferry.preflight.pairing import check_pair
from kvferry.preflight.verdicts import Verdict
from kvferry_plugins.types import ScheduleStyle

KEY = "a" * 40
REMOTE = [{"endpoint": "tcp://10.0.0.5:5555", "public_key": KEY}]
LOCAL = [{"endpoint": "tcp://127.0.0.1:5555", "public_key": KEY}]


def checked(pair):
    return {each.field: each for each in check_pair(*pair)}


def transceiver(**settings):
    return {"cache_transceiver_config": {**ON, **settings}}


def settings(side, **changes):
    return replace(side, settings=replace(side.settings, **changes))


def test_two_equal_sides_leave_nothing_to_say_but_that_they_are_on_one_machine(kit):
    found = checked(kit.pair())
    assert {name for name, each in found.items() if each.verdict is not Verdict.FINE} == {"peers"}
    assert found["peers"].verdict is Verdict.INFORMATION
    assert "one machine" in found["peers"].reason


@pytest.mark.parametrize("name", ["kv_transfer_timeout_ms", "kv_transfer_admission_timeout_ms"])
def test_clocks_that_differ_are_a_warning_with_both_lines(kit, name):
    found = checked(kit.pair(transceiver(**{name: 1000}), transceiver(**{name: 2000})))[name]
    assert (found.verdict, found.context, found.generation) == (Verdict.WARNING, 1000, 2000)
    assert [change.line for change in found.changes] == [
        f"cache_transceiver_config: {{{name}: 1000}}",
        f"cache_transceiver_config: {{{name}: 2000}}",
    ]


@pytest.mark.parametrize(
    ("context", "generation", "verdict"),
    [
        (True, True, Verdict.FINE),
        (False, False, Verdict.FINE),
        (True, False, Verdict.INFORMATION),
        (False, True, Verdict.WARNING),
    ],
)
def test_pipelining_is_the_context_sides_to_turn_on(kit, context, generation, verdict):
    pair = kit.pair(*[transceiver(enable_pipelined_transfer=each) for each in (context, generation)])
    assert checked(pair)["enable_pipelined_transfer"].verdict is verdict


def manager(second):
    return {"kv_cache_config": {"use_kv_cache_manager_v2": second}}


@pytest.mark.parametrize(
    ("context", "generation", "options", "verdict"),
    [
        (True, True, {"given": False}, Verdict.FINE),
        (True, False, {"given": False}, Verdict.UNKNOWN),
        (False, True, {"given": False}, Verdict.INFORMATION),
        (True, False, {}, Verdict.INFORMATION),
        (True, False, {"pretrained": WINDOWED}, Verdict.INFORMATION),
    ],
    ids=["alike", "V2 to V1, no model", "V1 to V2, no model", "V2 to V1, no windows", "V2 to V1, windows"],
)
def test_managers_that_differ_are_known_to_go_together_only_with_a_model(kit, context, generation, options, verdict):
    found = checked(kit.pair(manager(context), manager(generation), **options))["manager"]
    assert found.verdict is verdict
    assert bool(found.changes) is (verdict is Verdict.UNKNOWN)


@pytest.mark.parametrize(
    ("styles", "verdict", "words"),
    [
        ({ScheduleStyle.CONTEXT_FIRST}, Verdict.INFORMATION, "have to be context_first"),
        (set(), Verdict.FATAL, "no way to start"),
        (set(ScheduleStyle), Verdict.FINE, ""),
        (None, Verdict.UNKNOWN, "no plugin here declares"),
    ],
    ids=["one", "none", "both", "nobody knows"],
)
def test_a_request_needs_a_schedule_style_that_both_runtimes_declare(kit, styles, verdict, words):
    context, generation = kit.pair()
    pair = context, settings(generation, styles=None if styles is None else frozenset(styles))
    found = checked(pair)["schedule_styles"]
    assert found.verdict is verdict
    assert words in found.reason


@pytest.mark.parametrize(
    ("context", "generation", "verdict"),
    [
        ([], [], Verdict.INFORMATION),
        (LOCAL, [], Verdict.INFORMATION),
        (REMOTE, [], Verdict.WARNING),
        ([], REMOTE, Verdict.WARNING),
        (REMOTE, REMOTE, Verdict.UNKNOWN),
    ],
    ids=["none", "loopback", "the context side's", "the generation side's", "both"],
)
def test_peers_beyond_loopback_have_to_be_listed_on_both_sides(kit, context, generation, verdict):
    found = checked(kit.pair({"peers": context}, {"peers": generation}))["peers"]
    assert found.verdict is verdict
    if verdict is Verdict.WARNING:
        (change,) = found.changes
        assert change.where == ("generation.yaml" if context else "context.yaml")
        assert change.line.startswith("peers: [{endpoint: 'tcp://HOST:PORT'")


def running(side, endpoint, peers=()):
    return replace(settings(side, endpoint=endpoint, peers=tuple(peers)), running=True, said_role=side.role.value)


@pytest.mark.parametrize(
    ("endpoint", "trusted", "verdict", "words"),
    [
        ("tcp://10.0.0.5:5555", [], Verdict.FATAL, "which the generation side does not trust"),
        ("tcp://10.0.0.5:5555", ["tcp://10.0.0.6:5555"], Verdict.FATAL, "which the generation side does not trust"),
        ("tcp://10.0.0.5:5555", ["tcp://10.0.0.5:5555"], Verdict.UNKNOWN, "when they meet"),
        ("tcp://127.0.0.1:5555", ["tcp://10.0.0.5:5555"], Verdict.WARNING, "on loopback alone"),
        ("tcp://127.0.0.1:5555", [], Verdict.INFORMATION, "one machine"),
    ],
)
def test_a_running_context_workers_endpoint_proves_who_reaches_it(kit, endpoint, trusted, verdict, words):
    context, generation = kit.pair()
    remote = [] if endpoint.startswith("tcp://127") and not trusted else ["tcp://10.0.0.9:1"]
    pair = running(context, endpoint, remote), running(generation, "tcp://10.0.0.9:1", trusted)
    found = checked(pair)["peers"]
    assert found.verdict is verdict
    assert words in found.reason


def test_a_worker_that_does_not_say_whom_it_trusts_leaves_it_unknown(kit):
    context, generation = kit.pair()
    found = checked((settings(context, peers=None, endpoint="tcp://127.0.0.1:1"), generation))["peers"]
    assert found.verdict is Verdict.UNKNOWN


def test_a_worker_in_the_others_place_is_fatal(kit):
    context, generation = kit.pair()
    found = checked((replace(context, running=True, said_role="generation"), generation))["role"]
    assert found.verdict is Verdict.FATAL
    assert "context.yaml serves the generation side" in found.reason
    assert "role" not in checked((context, generation))


def test_where_a_transceiver_is_off_nothing_of_it_is_compared(kit):
    assert set(checked(kit.pair({"cache_transceiver_config": None}, {}))) == {"manager"}
