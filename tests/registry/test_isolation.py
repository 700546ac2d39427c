import os
import subprocess
import sys
import time

import pytest

from kvferry.registry.isolation import Call, call_isolated

BODY = """
import ctypes, os, subprocess, sys, time

def add(one, two):
    return {"sum": one + two}

def chatters():
    os.write(1, b"noise " * 1_000_000)
    os.write(2, b"\\nlast words\\n")
    return "heard"

def hangs():
    time.sleep(600)

def leaves_a_child_behind(path):
    child = subprocess.Popen(["sleep", "600"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    return "left"

def hangs_with_a_child(path):
    leaves_a_child_behind(path)
    time.sleep(600)

def a_child_that_left_the_group_chatters():
    if os.fork() == 0:
        os.setsid()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            os.write(1, b"more " * 1000)
        os._exit(0)
    return "answered"

def crashes():
    ctypes.string_at(0)

def exits():
    print("about to leave")
    os._exit(7)

def calls_exit():
    sys.exit("no more")

def raises():
    raise RuntimeError("it broke") from KeyError("why")

def answers_an_object():
    return object()

def answers_too_much():
    return "x" * 2_000_000

def writes_where_the_answer_belongs():
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, b"garbage\\n")
        except OSError:
            pass
    os._exit(0)
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    (tmp_path / "kvferry_odd_functions.py").write_text(BODY)
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(function, *arguments, timeout=20.0):
        (ending,) = call_isolated([Call(f"kvferry_odd_functions:{function}", arguments)], timeout=timeout)
        return ending

    return call


def test_a_function_is_called_and_its_answer_comes_back(call):
    assert call("add", 1, 2).value == {"sum": 3}


def test_megabytes_of_output_do_not_touch_the_answer_and_only_the_end_is_kept(call):
    ending = call("chatters")

    assert ending.value == "heard"
    assert ending.output[-1] == "last words"
    assert sum(map(len, ending.output)) < 10_000


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        ("crashes", "was killed by signal 11 (SIGSEGV)"),
        ("exits", "ended Python with 7"),
        ("calls_exit", "called sys.exit('no more')"),
        ("raises", "raised RuntimeError: it broke ← KeyError: 'why'"),
        ("answers_an_object", "which is no JSON"),
        ("answers_too_much", "answered more than"),
        ("writes_where_the_answer_belongs", "where its answer belongs"),
        ("no_such_function", "has no attribute 'no_such_function'"),
    ],
)
def test_whatever_it_does_instead_is_told(call, function, failure):
    ending = call(function)

    assert failure in ending.failure
    assert ending.value is None


def test_what_it_printed_before_it_left_is_kept(call):
    assert call("exits").output == ("about to leave",)


def test_a_hang_ends_at_the_deadline_with_all_that_it_started(call, tmp_path, has_gone):
    started = time.monotonic()

    ending = call("hangs_with_a_child", str(tmp_path / "pid"), timeout=1.5)

    assert ending.failure == "did not end within 1.5 s"
    assert time.monotonic() - started < 10
    assert has_gone(int((tmp_path / "pid").read_text()))


def test_a_child_that_it_leaves_behind_is_killed(call, tmp_path, has_gone):
    assert call("leaves_a_child_behind", str(tmp_path / "pid")).value == "left"
    assert has_gone(int((tmp_path / "pid").read_text()))


def test_a_child_that_left_its_group_holds_nobody_up(call):
    assert call("a_child_that_left_the_group_chatters").value == "answered"


def test_all_are_called_in_their_order_and_no_descriptor_is_left_open(call):
    before = os.listdir("/proc/self/fd")
    calls = [Call("kvferry_odd_functions:add", (number, 0)) for number in range(5)]
    told = []

    endings = call_isolated(calls, timeout=20, at_once=2, on_end=lambda call, _: told.append(call.arguments[0]))

    assert [ending.value["sum"] for ending in endings] == [0, 1, 2, 3, 4]
    assert sorted(told) == [0, 1, 2, 3, 4]
    assert os.listdir("/proc/self/fd") == before


def test_an_orphan_ends_by_its_own_alarm(tmp_path):
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "kvferry.registry.isolated_child", str(writer), "1", "time:sleep", "[600]"]

    with subprocess.Popen(command, pass_fds=(writer,)) as child:
        assert child.wait(20) == -14  # SIGALRM
    os.close(reader)
    os.close(writer)
