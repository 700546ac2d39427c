import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.serving.text import StopTexts, TextStream

BYTES = {number: bytes([number]) for number in range(256)}


def decode(token_ids):
    return b"".join(BYTES[token] for token in token_ids).decode("utf-8", "replace")


def told(text, prompt=b""):
    stream = TextStream(decode, list(prompt))
    return [*(stream.push(token) for token in text.encode()), stream.end()]


@given(st.text(max_size=20), st.text(max_size=8))
def test_the_pieces_add_up_to_the_text(text, prompt):
    assert "".join(told(text, prompt.encode())) == text


@given(st.text(max_size=20).filter(lambda text: "\N{REPLACEMENT CHARACTER}" not in text))
def test_no_piece_holds_half_a_character(text):
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(told(text))


def test_an_unfinished_character_is_shown_at_the_end():
    stream = TextStream(decode, [])
    assert [stream.push(token) for token in "ä".encode()[:1]] == [""]
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"


@given(st.lists(st.text("abc", max_size=4)), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_what_is_shown_ends_before_the_first_stop_text(pieces, stops):
    whole = "".join(pieces)
    found = [whole.find(stop) for stop in stops if stop in whole]
    shower = StopTexts(stops)
    shown = "".join(shower.push(piece) for piece in pieces) + shower.end()
    assert shower.found == bool(found)
    if len(found) < 2:
        assert shown == (whole[: found[0]] if found else whole)
    assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize(
    ("piece", "shown"), [("go on", "go on"), ("go on st", "go on "), ("sto", ""), ("stork", "stork")]
)
def test_only_what_may_begin_a_stop_text_is_held_back(piece, shown):
    assert StopTexts(["stop"]).push(piece) == shown
