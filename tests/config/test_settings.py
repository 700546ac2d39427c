from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from kvferry.config.settings import NO_DEFAULT, settings


class Inner(BaseModel):
    """A section."""

    word: Literal["yes", True] = "yes"
    """One of
    two."""


class Outer(BaseModel):
    """All kinds of settings."""

    needed: int
    limited: Annotated[int, Field(gt=0)] | None = None
    share: float = Field(0.5, ge=0, le=1)
    many: tuple[Annotated[int, Field(gt=0)], ...] = ()
    names: dict[str, str] = Field(default_factory=dict)
    one: Inner = Inner()
    several: tuple[Inner, ...] = ()
    either: int | str = 1


FOUND = {setting.key: setting for setting in settings(Outer)}


def test_a_section_comes_before_its_settings_and_a_lists_items_too():
    assert list(FOUND) == [
        *("needed", "limited", "share", "many", "names", "one", "one.word", "several", "several.word", "either"),
    ]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("needed", "integer"),
        ("limited", "integer > 0 or null"),
        ("share", "number ≥ 0 and ≤ 1"),
        ("many", "list of integer > 0"),
        ("names", "mapping"),
        ("one", "section"),
        ("one.word", "yes or true"),
        ("several", "list of section"),
        ("either", "other"),
    ],
)
def test_a_type_is_named_as_people_do(key, text):
    assert str(FOUND[key].type) == text


def test_defaults_are_plain_and_a_missing_one_is_told_from_null():
    defaults = {key: setting.default for key, setting in FOUND.items()}
    assert defaults["needed"] is NO_DEFAULT
    assert (defaults["limited"], defaults["many"], defaults["names"], defaults["one"]) == (None, [], {}, {})


def test_the_meaning_is_the_text_below():
    assert (FOUND["one.word"].meaning, FOUND["needed"].meaning) == ("One of two.", "")
