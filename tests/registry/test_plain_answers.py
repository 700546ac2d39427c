import enum
import time
from collections.abc import Mapping

import pytest

from kvferry.registry.answers import Rank
from kvferry.registry.guard import Guard
from kvferry.registry.load import register_all
from kvferry.registry.plain_answers import MOST_ITEMS, MOST_LEVELS, plain
from kvferry.registry.records import Origin, PluginRecord, State
from kvferry.registry.selection import Selection
from kvferry_plugins import hookimpl
from kvferry_plugins.errors import HookError


class Pretends(str):
    __slots__ = ()

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __str__(self):
        raise AssertionError("a stranger's code ran")

    __repr__ = __str__


class Endless(Mapping):
    def __getitem__(self, key):
        return 1

    def __len__(self):
        return 1

    def __iter__(self):
        number = 0
        while True:
            number += 1
            yield str(number)


class Wish(enum.StrEnum):
    PYTHON = "PYTHON"


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "x", [1, ("a", None)], {"a": {"b": [False]}}], ids=repr)
def test_what_is_plain_stays(value):
    assert plain(value) == value
    assert type(plain(value)) is type(value)


def test_what_is_like_text_is_text():
    for value, text in ((Pretends("evil"), "evil"), (Wish.PYTHON, "PYTHON")):
        assert type(plain(value)) is str
        assert plain(value) == text
    assert plain({Pretends("key"): 1}) == {"key": 1}


def test_what_is_strange_is_quoted_at_once():
    class Odd:
        def __init__(self):
            self.asked = 0

        def __repr__(self):
            self.asked += 1
            return f"odd {self.asked}"

    strange = plain(Odd())
    assert [repr(strange), repr(strange)] == ["odd 1", "odd 1"]
    assert repr(plain({Odd(): 1})) == "{odd 1: 1}"


def test_what_has_no_end_is_refused():
    within = {}
    within["again"] = within
    deep = [None]
    for _ in range(MOST_LEVELS):
        deep = [deep]
    for value, told in ((within, "contains itself"), (deep, "levels deep"), (Endless(), "without end")):
        with pytest.raises(ValueError, match=told):
            plain(value)
    with pytest.raises(ValueError, match=str(MOST_ITEMS)):
        plain([0] * (MOST_ITEMS + 1))


class Text(Exception):
    """Of which the text is the plugin's code."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text()


def leave():
    raise SystemExit(3)


def hang():
    time.sleep(600)
    return ""


class Own(BaseException):
    pass


def asked(behaviour):
    class Plugin:
        @hookimpl
        def preferred_transceiver_runtime(self, architecture):
            return behaviour()

    record = PluginRecord("odd", "odd-kvferry", "1.0", "odd", Origin.EXTERNAL, Rank.EXTERNAL, State.DISCOVERED)
    registry = register_all(Selection((record,)), {"odd": Plugin()}, guard=Guard(0.3))
    return registry.preferred_transceiver_runtime("AcmeForCausalLM", None)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (Text(leave), "raised Text: <its text raises SystemExit>"),
        (Text(hang), "raised Text: <its text does not end>"),
        (Own("enough"), "raised Own: enough"),
        (SystemExit(4), "raised SystemExit: 4"),
    ],
    ids=["text that leaves", "text that hangs", "no Exception", "exit"],
)
def test_whatever_a_hook_raises_names_its_plugin(error, told):
    def behaviour():
        raise error

    with pytest.raises(HookError) as caught:
        asked(behaviour)
    assert caught.value.plugin == "odd"
    assert told in str(caught.value)


def test_an_answer_whose_quotation_hangs_is_ended():
    class Slow:
        def __repr__(self):
            return hang()

    with pytest.raises(HookError, match=r"its hook preferred_transceiver_runtime did not end within 0\.3 s"):
        asked(Slow)
