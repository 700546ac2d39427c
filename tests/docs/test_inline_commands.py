import re

import click
import pytest
from docs.pages import all_pages, name_of

from kvferry.cli.main import main

_SPAN = re.compile(r"(?<!`)`((?:[A-Z][A-Z_]*=\S+ )*kvferry [^`\n]+)`(?!`)")
_VARIABLE = re.compile(r"[A-Z][A-Z_]*=\S+")


def spans():
    found = {}
    for path in all_pages():
        for text in _SPAN.findall(path.read_text()):
            if not {"→", "VERB", "…"} & set(text.split()):
                found.setdefault(text, name_of(path))
    return sorted(found.items())


def parts_of(text):
    """The verb that a command names, and the options that it gives it."""
    command, words = main, [word for word in text.split() if not _VARIABLE.fullmatch(word)][1:]
    for number, word in enumerate(words):
        if not isinstance(command, click.Group):
            return command, words[number:]
        if word.startswith("-"):
            continue
        nested = command.get_command(click.Context(command), word)
        if nested is None:
            return None, words[number:]
        command = nested
    return command, []


@pytest.mark.parametrize(("text", "page"), spans())
def test_a_command_in_the_text_has_a_verb_and_options_that_exist(text, page):
    for alternative in _alternatives(text):
        command, words = parts_of(alternative)
        assert command is not None, f"{page}: {words[0]!r} of `{text}` is no verb"
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        unknown = [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]
        assert not unknown, f"{page}: `{text}`"


def _alternatives(text):
    """``plugins enable|disable NAME`` is two commands."""
    words = text.split()
    for number, word in enumerate(words):
        if "|" in word and not word.startswith("-"):
            return [" ".join([*words[:number], each, *words[number + 1 :]]) for each in word.split("|")]
    return [text]
