from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest

from kvferry.reference.markdown import prose, table, yaml_value
from kvferry.reference.source import attributes, read_docstring, signature


@dataclass
class Thing:
    """A thing."""

    name: "str"
    """``acme``,
    or another."""
    size: int = 3
    options: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    _hidden: int = 0

    def grow(self, by: int, *, twice: bool = False) -> "Thing":
        """Grow."""


def test_an_attribute_is_told_as_its_author_wrote_it():
    name, size, options = attributes(Thing)

    assert (name.annotation, name.default, name.meaning) == ("str", "", "``acme``, or another.")
    assert (size.name, size.default, size.meaning) == ("size", "3", "")
    assert options.default == "{}"


def test_a_signature_is_one_line_without_self():
    assert signature(Thing.grow) == "grow(by: int, *, twice: bool=False) -> 'Thing'"


def test_a_docstring_is_taken_apart():
    about = read_docstring("""Do it.

    Args:
        what: the thing,
            all of it.
        how: well.

    Returns:
        One of these: yes, no.
    """)

    assert about.summary == "Do it."
    assert about.sections == {
        "Args": {"what": "the thing, all of it.", "how": "well."},
        "Returns": {"": "One of these: yes, no."},
    }
    assert read_docstring(None).summary == ""


def test_a_cell_may_hold_a_bar_and_a_line_break():
    assert table(("a",), [("x | y\nz",)]) == "| a |\n| --- |\n| x \\| y z |"


def test_a_docstrings_code_becomes_markdowns_and_a_fence_stays():
    assert prose("``a`` and\n```text\nb\n```") == "`a` and\n```text\nb\n```"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "`null`"), (True, "`true`"), (1, "`1`"), (0, "`0`"), ("auto", "`auto`"), ((), "empty"), ({}, "empty")],
    ids=str,
)
def test_a_value_is_written_as_in_yaml(value, text):
    assert yaml_value(value) == text
