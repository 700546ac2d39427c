import os
import signal
import sys
import threading
import warnings

import pytest

from kvferry.registry.conduct import Remembered, observed, take_state


def change(what):
    told = []
    with observed(told.append):
        what()
    return told


def test_an_import_that_changes_nothing_is_told_nothing_of():
    assert change(lambda: None) == []


def set_variables():
    os.environ["KVFERRY_TEST_NEW"] = "1"
    os.environ["KVFERRY_TEST_OLD"] = "2"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (set_variables, "changes the environment: KVFERRY_TEST_NEW, KVFERRY_TEST_OLD (put back)"),
        (os.environ.clear, "more (put back)"),
        (lambda: os.chdir("/"), "changes the working folder to '/' (put back)"),
        (lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN), "handles signals: SIGUSR2 (put back)"),
        (lambda: setattr(sys, "excepthook", print), "replaces sys.excepthook (put back)"),
    ],
    ids=["variables", "all variables", "folder", "signal", "excepthook"],
)
def test_what_is_changed_is_told_and_put_back(monkeypatch, tmp_path, what, told):
    monkeypatch.setenv("KVFERRY_TEST_OLD", "1")
    monkeypatch.chdir(tmp_path)
    before = take_state()

    (sentence,) = change(what)

    assert told in sentence
    assert take_state() == before


def test_it_is_put_back_though_the_import_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = []

    def import_it():
        os.chdir("/")
        raise RuntimeError

    with pytest.raises(RuntimeError), observed(told.append):
        import_it()

    assert (len(told), os.getcwd()) == (1, str(tmp_path))


def test_a_folder_that_was_removed_before_is_no_matter(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert change(lambda: None) == []


def test_many_variables_are_counted_and_a_few_named():
    def set_many():
        os.environ.update({f"KVFERRY_TEST_{number:03}": "x" for number in range(300)})

    (sentence,) = change(set_many)

    assert sentence.endswith("KVFERRY_TEST_004 and 295 more (put back)")


def test_one_after_the_other_each_is_told_what_it_changed_itself(monkeypatch):
    monkeypatch.setenv("KVFERRY_TEST_OLD", "1")
    remembered = Remembered()
    told = []
    for value in ("1", "2", "1", "3"):
        with observed(told.append, remembered):
            os.environ["KVFERRY_TEST_OLD"] = value

    assert told == ["changes the environment: KVFERRY_TEST_OLD (put back)"] * 2
    assert os.environ["KVFERRY_TEST_OLD"] == "1"


def test_a_thread_is_named():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="poller")

    told = change(thread.start)
    release.set()
    thread.join()

    assert told == ["starts 1 thread(s): poller"]


def test_a_library_may_hush_its_own_warnings_and_nobody_elses():
    before = list(warnings.filters)
    try:
        assert change(lambda: warnings.filterwarnings("ignore", message="acme is slow today")) == []
        assert len(warnings.filters) == len(before) + 1
        assert change(lambda: warnings.simplefilter("ignore")) == ["changes the filters of warnings (put back)"]
        assert len(warnings.filters) == len(before) + 1
    finally:
        warnings.filters[:] = before
