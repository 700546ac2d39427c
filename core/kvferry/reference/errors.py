"""``docs/reference/errors.md``: every error of the contract, what it carries, and what to do."""

from collections.abc import Iterator
from typing import Final

from kvferry.cli.output import CHECK_FAILED, INPUT_WRONG, WRONG_INPUT
from kvferry.reference.markdown import bullets, code, page, prose
from kvferry.reference.source import Docstring, read_docstring
from kvferry_plugins import errors
from kvferry_plugins.errors import KvferryError

TO_DO: Final = "What to do"
"""The docstring's section that says it."""

INTRODUCTION: Final = """\
Every error that kvferry raises on purpose is a `KvferryError` from `kvferry_plugins.errors`. Its message says what
is wrong, where, and what to do next; what a program needs is in its attributes, and the cause is chained. A verb
prints it as one paragraph (`--json`: as an item of `errors`, with `type`, `message` and `setting`; `--debug` adds
the traceback) and ends with the exit status below. What their messages mean in operation is in
[Operate](../operate.md)."""


def errors_page() -> str:
    """Write the page."""
    tree = "```text\n" + "\n".join(_tree(KvferryError)) + "\n```"
    return page("Errors", "plugins/kvferry_plugins/errors.py", INTRODUCTION, tree, *map(_error, contract_errors()))


def contract_errors() -> Iterator[type[KvferryError]]:
    """Yield the error classes of the contract, in its order."""
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, KvferryError):
            yield value


def _error(cls: type[KvferryError]) -> str:
    about = read_docstring(cls.__doc__)
    said = [paragraph for paragraph in about.paragraphs if not paragraph.startswith(f"{TO_DO}: ")]
    parts = [f"## {cls.__name__}", *said, _facts(cls), _carried(cls)]
    return prose("\n\n".join(part for part in parts if part)) + _advice(about)


def _facts(cls: type[KvferryError]) -> str:
    status = INPUT_WRONG if issubclass(cls, WRONG_INPUT) else CHECK_FAILED
    builtin = [
        code(each.__name__) for each in cls.__bases__ if not issubclass(each, KvferryError) and each is not Exception
    ]
    return f"Exit status {status}" + (f"; it is a {builtin[0]} too." if builtin else ".")


def _carried(cls: type[KvferryError]) -> str:
    """List the attributes, those of the classes above too."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        found |= read_docstring(each.__doc__).sections.get("Attributes", {}) if issubclass(each, KvferryError) else {}
    return "It carries:\n\n" + bullets(f"`{name}`: {text}" for name, text in found.items()) if found else ""


def _advice(about: Docstring) -> str:
    advice = [text.removeprefix(f"{TO_DO}: ") for text in about.paragraphs if text.startswith(f"{TO_DO}: ")]
    return f"\n\n**What to do:** {prose(advice[0])}" if advice else ""


def _tree(cls: type, depth: int = 0) -> Iterator[str]:
    yield "    " * depth + cls.__name__
    for each in contract_errors():
        if cls in each.__bases__:
            yield from _tree(each, depth + 1)
