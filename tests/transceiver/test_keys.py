import os
import threading

import pytest
import zmq

from kvferry.transceiver.keys import load_or_make_key
from kvferry_plugins.errors import ConfigError


def test_the_key_is_made_once_and_for_this_user_alone(tmp_path):
    path = tmp_path / "deep" / "curve.key"
    made = load_or_make_key(path)
    assert load_or_make_key(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert made.secret not in repr(made)
    assert os.listdir(path.parent) == ["curve.key"]


def test_two_that_make_it_at_once_have_the_same_key(tmp_path):
    made = []
    start = threading.Barrier(8)

    def make():
        start.wait()
        made.append(load_or_make_key(tmp_path / "curve.key"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert len(set(made)) == 1


def test_the_variable_names_another_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CURVE_KEY_FILE", str(tmp_path / "mine"))
    load_or_make_key()
    assert (tmp_path / "mine").exists()


def write(path, text, mode=0o600):
    path.write_bytes(text)
    path.chmod(mode)
    return path


def pair():
    return b"\n".join(zmq.curve_keypair())


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (pair(), 0o644, "chmod 600"),
        (b"", 0o600, "cannot be used"),
        (b"one two three", 0o600, "cannot be used"),
        (b"\xff\xfe", 0o600, "cannot be used"),
        (zmq.curve_keypair()[0] + b" " + zmq.curve_keypair()[1], 0o600, "no pair"),
    ],
    ids=["readable by others", "empty", "words", "not text", "no pair"],
)
def test_a_bad_key_file_is_an_error_that_names_it(tmp_path, text, mode, says):
    path = write(tmp_path / "curve.key", text, mode)
    with pytest.raises(ConfigError, match=says) as caught:
        load_or_make_key(path)
    assert str(path) in str(caught.value)


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/curve\.key"):
        load_or_make_key(tmp_path / "file" / "curve.key")
