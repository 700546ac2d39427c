"""Quotes what a plugin handed over: cut, and whatever its ``repr`` does."""

import reprlib
from typing import Final

MESSAGE_CHARACTERS: Final = 2000
"""What one error's text holds at most of what a plugin says."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlong = 60
_short.maxlevel = 5
_short.maxdict = _short.maxlist = _short.maxtuple = _short.maxset = _short.maxfrozenset = 12


def quote(value: object) -> str:
    """Like ``repr``, of a few hundred characters, and never raising."""
    try:
        return cut(_short.repr(value), 600)
    except (Exception, SystemExit, GeneratorExit) as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"


def cut(text: str, characters: int = MESSAGE_CHARACTERS) -> str:
    """The text, or its beginning and how long it is."""
    return text if len(text) <= characters else f"{text[:characters]}… ({len(text)} characters)"


def message_of(error: BaseException) -> str:
    """What an error says, cut; an error whose text raises says so."""
    try:
        return cut(str(error))
    except (Exception, SystemExit, GeneratorExit) as another:
        return f"<its text raises {type(another).__name__}>"
