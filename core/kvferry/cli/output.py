"""How every verb speaks: one JSON object or text, errors as one paragraph, and the exit status."""

import errno
import functools
import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn, ParamSpec, TypeVar

import click

from kvferry_plugins.errors import ConfigError, KvferryError, PluginError, ResolutionError

SCHEMA = 1
"""Of every JSON object that a verb prints."""

CHECK_FAILED = 1
INPUT_WRONG = 2
WRONG_INPUT = (ConfigError, PluginError)
"""Errors whose exit status is ``INPUT_WRONG``; any other's is ``CHECK_FAILED``."""

P = ParamSpec("P")
T = TypeVar("T")


def json_option(function: Callable[P, T]) -> Callable[P, T]:
    """Add ``--json``, which arrives as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(function)


def report_errors(
    function: Callable[P, T] | None = None, *, fields: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """Decorate a verb: what it raises becomes a paragraph on stderr, or JSON under ``--json``, and an exit status.

    Put it above the options whose evaluation may fail, so that they are covered too.

    Args:
        function: the verb.
        fields: the keys that this verb's JSON has beyond the envelope, with their values when it fails.
    """
    if function is None:
        return functools.partial(report_errors, fields=fields)

    @functools.wraps(function)
    def reported(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _is_clicks_own(error):
                raise
            if _debug():
                click.echo("".join(traceback.format_exception(error)), err=True)
            fail(error, as_json=bool(kwargs.get("as_json")), fields=fields)

    return reported


def fail(
    error: Exception, *, as_json: bool, fields: Mapping[str, object] | None = None, warnings: Sequence[str] = ()
) -> NoReturn:
    """Report an error and end with its exit status. Raises SystemExit."""
    if as_json:
        print_json(envelope(ok=False, warnings=warnings, errors=error_items(error), **dict(fields or {})))
    else:
        print_warnings(warnings)
        click.echo(paragraph(error), err=True)
    raise SystemExit(exit_status(error))


def envelope(
    *, ok: bool, warnings: Iterable[str] = (), errors: Iterable[Mapping[str, object]] = (), **fields: object
) -> dict[str, object]:
    """Make the object that a verb prints under ``--json``."""
    return {"schema": SCHEMA, "ok": ok, **fields, "warnings": list(warnings), "errors": list(errors)}


def print_json(value: Mapping[str, object]) -> None:
    """Print one object; read-only mappings, tuples and sets become JSON's own."""
    text = json.dumps(value, indent=2, default=_to_plain, ensure_ascii=False)
    # Of what no encoding has, such as a variable's byte that is no text, JSON's own escape stays.
    click.echo(text.encode(errors="backslashreplace").decode())


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings on stderr, a line each."""
    for warning in warnings:
        click.echo(f"warning: {printable(warning)}", err=True)


def print_errors(errors: Iterable[Exception]) -> None:
    """Print errors on stderr, a paragraph each."""
    for error in errors:
        click.echo(paragraph(error), err=True)


def error_items(error: BaseException) -> list[dict[str, str | None]]:
    """Describe an error as JSON's ``errors``: several where it holds several."""
    return [
        {"type": type(each).__name__, "message": _message(each), "setting": getattr(each, "setting", None)}
        for each in _flat(error)
    ]


def paragraph(error: BaseException) -> str:
    """Say what is wrong, where, and what to do."""
    message = "\n".join(map(printable, _message(error).split("\n")))
    if isinstance(error, KvferryError):
        return f"kvferry: {message}"
    return f"kvferry stopped on an error of its own, {message}; run `kvferry --debug …` for the traceback"


def printable(text: str) -> str:
    """Take out what would move a terminal's cursor: some of it was said by strangers."""
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)


def exit_status(error: BaseException) -> int:
    """2 where the input is wrong (configuration and plugins), else 1."""
    return INPUT_WRONG if isinstance(error, WRONG_INPUT) else CHECK_FAILED


def _flat(error: BaseException) -> list[BaseException]:
    if isinstance(error, ResolutionError):
        return [each for blocker in error.blockers for each in _flat(blocker)]
    return [error]


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, KvferryError) else f"{type(error).__name__}: {error}"


def _is_clicks_own(error: Exception) -> bool:
    is_pipe = isinstance(error, OSError) and error.errno == errno.EPIPE
    return is_pipe or isinstance(error, click.ClickException | click.exceptions.Exit | click.Abort)


def _debug() -> bool:
    context = click.get_current_context(silent=True)
    return bool(context and context.find_root().params.get("debug"))


def _to_plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, AbstractSet):
        return sorted(value, key=str)
    return str(value)
