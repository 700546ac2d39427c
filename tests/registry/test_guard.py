import io
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvferry.registry.answers import Rank
from kvferry.registry.diversion import KEPT_BYTES, PASSED_CHARACTERS, Diversion
from kvferry.registry.guard import Guard, limit_seconds
from kvferry.registry.quoting import cut, message_of, quote
from kvferry.registry.records import Origin, PluginRecord, State
from kvferry.registry.time_limits import TimeIsUpError
from kvferry_plugins.errors import ConfigError

ACME = PluginRecord("acme", "acme-kvferry", "1.0", "acme", Origin.EXTERNAL, Rank.EXTERNAL, State.DISCOVERED)
FOREVER = 60


@pytest.fixture
def alone(monkeypatch):
    """As in a command: whatever threads the test runner has."""
    monkeypatch.setattr(Guard, "_is_alone", lambda self: threading.current_thread() is threading.main_thread())


def ask(guard, question):
    with guard.watching():
        return guard.ask(ACME, "model_defaults", question)


def test_a_hook_that_answers_in_time_is_left_alone(alone):
    guard = Guard()

    assert ask(guard, lambda: 7) == 7
    assert guard.notes == {}


def test_a_hook_that_blocks_is_interrupted_and_the_next_one_has_the_whole_limit(alone):
    guard = Guard(0.3)
    with guard.watching():
        with pytest.raises(TimeIsUpError, match=r"did not end within 0\.3 s"):
            guard.ask(ACME, "model_defaults", lambda: time.sleep(FOREVER))
        assert guard.ask(ACME, "model_defaults", lambda: time.sleep(0.01)) is None


def test_an_interruption_that_was_swallowed_comes_again(alone):
    def stubborn():
        try:
            time.sleep(FOREVER)
        except BaseException:
            time.sleep(FOREVER)

    with pytest.raises(TimeIsUpError):
        ask(Guard(0.2), stubborn)


def test_many_that_are_quick_are_not_taken_for_one_that_is_slow(alone):
    guard = Guard(0.3)
    with guard.watching():
        for _ in range(8):
            guard.ask(ACME, "model_defaults", lambda: time.sleep(0.05))


def test_a_signal_that_a_host_handles_stays_its_own(alone):
    before = signal.signal(signal.SIGURG, signal.SIG_IGN)
    try:
        assert ask(Guard(0.1), lambda: time.sleep(0.3) or signal.getsignal(signal.SIGURG)) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGURG, before)


def test_no_handler_stays(alone):
    ask(Guard(5), lambda: None)

    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


def test_a_short_limit_after_a_long_one_is_kept(alone):
    ask(Guard(FOREVER), lambda: None)

    with pytest.raises(TimeIsUpError):
        ask(Guard(0.2), lambda: time.sleep(FOREVER))


def test_beside_other_threads_a_guard_keeps_out_of_the_way():
    guard = Guard()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        stdout = sys.stdout
        assert ask(guard, lambda: sys.stdout is stdout)
        assert guard.notes == {}
    finally:
        release.set()
        thread.join()


def test_on_another_thread_a_guard_keeps_out_of_the_way():
    guard = Guard()
    answers = []
    stdout = sys.stdout
    thread = threading.Thread(target=lambda: answers.append(ask(guard, lambda: sys.stdout is stdout)))
    thread.start()
    thread.join()

    assert answers == [True]


def test_what_is_printed_is_counted_once_and_noted_by_name(alone, capsys):
    guard = Guard()

    ask(guard, lambda: print("x" * 10_000))

    (note,) = guard.notes
    assert note.startswith("plugin 'acme' (acme-kvferry 1.0): its hook model_defaults prints 10,001 characters")
    told = capsys.readouterr()
    assert (told.out, len(told.err)) == ("", PASSED_CHARACTERS)


def test_a_stream_that_a_plugin_kept_works_after_the_diversion(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    diversion = Diversion()
    with diversion.open():
        kept = sys.stderr
        print("a" * 5000, file=kept)
        assert diversion.take() == 5001
    print("later", file=kept)

    assert sys.stderr.getvalue() == "a" * PASSED_CHARACTERS + "later\n"


def test_descriptor_1_leads_elsewhere_even_for_another_process_and_only_so_much_fits():
    diversion = Diversion()
    with diversion.open():
        os.write(1, b"native")
        subprocess.run(["echo", "a process"], check=True)
        assert diversion.take() == len("native") + len("a process\n")
        assert os.write(1, b"x" * (KEPT_BYTES + 1)) == KEPT_BYTES
        with pytest.raises(PermissionError):
            os.write(1, b"x")
        assert diversion.take() == KEPT_BYTES


def test_no_descriptor_is_left_open():
    before = os.listdir("/proc/self/fd")
    with Diversion().open():
        pass

    assert os.listdir("/proc/self/fd") == before


def test_a_command_whose_stdout_is_closed_is_diverted_all_the_same():
    code = (
        "from kvferry.registry.diversion import Diversion\nd = Diversion()\n"
        "with d.open():\n    print('x')\n    assert d.take() == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE)


@pytest.mark.parametrize("text", ["1", " 2.5 ", "", "30"])
def test_the_limit_is_a_number_of_seconds(text):
    assert limit_seconds({"KVFERRY_PLUGIN_IMPORT_SECONDS": text}) == float(text or 30)


@pytest.mark.parametrize("text", ["x", "0", "-3", "inf", "nan", "9" * 400])
def test_another_limit_is_refused(text):
    with pytest.raises(ConfigError, match="KVFERRY_PLUGIN_IMPORT_SECONDS"):
        limit_seconds({"KVFERRY_PLUGIN_IMPORT_SECONDS": text})


# --- quoting ---------------------------------------------------------------------------------------------------------


class Rude:
    def __repr__(self):
        raise RuntimeError("no")

    __str__ = __repr__


@pytest.mark.parametrize("value", ["short", 7, None, ["a", 1.5], {"b": 1, "a": {"c": (1, 2)}}, ("x",), frozenset([1])])
def test_a_small_value_is_quoted_as_it_is(value):
    assert eval(quote(value)) == value


@pytest.mark.parametrize(
    "value",
    ["x" * 10**7, [0] * 10**6, {"k" * 10**6: "v" * 10**6}, b"x" * 10**6, 10**4000, Rude(), [Rude()]],
    ids=range(7),
)
def test_whatever_is_quoted_is_short(value):
    assert len(quote(value)) < 1000


def test_a_text_that_is_cut_says_how_long_it_was():
    assert cut("x" * 5000, 10) == "x" * 10 + "… (5000 characters)"


def test_an_error_whose_text_raises_is_told():
    class RudeError(Exception):
        def __str__(self):
            raise RuntimeError

    assert message_of(RudeError()) == "<its text raises RuntimeError>"
