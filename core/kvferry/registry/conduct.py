"""What a plugin's import changed in the process beside importing: seen, put back where it can be, and told."""

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvferry.registry.quoting import cut, quote

_NAMES_SHOWN: Final = 5
_SIGNALS: Final = tuple(sorted(int(number) for number in signal.valid_signals() if number < signal.SIGRTMIN))
PUT_BACK: Final = " (put back)"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What an import has no business to change."""

    environ: Mapping[str, str]
    folder: str | None
    path: tuple[str, ...]
    finders: tuple[Any, ...]
    excepthook: Any
    recursion_limit: int
    blocked: frozenset[int]
    handlers: tuple[Any, ...]
    locale: str
    filters: tuple[Any, ...]
    log_handlers: tuple[Any, ...]
    threads: frozenset[threading.Thread]
    processes: frozenset[int]


def take_state() -> ProcessState:
    """Look at this process, from its main thread."""
    logging = sys.modules.get("logging")
    return ProcessState(
        os.environ.copy(),
        _folder(),
        tuple(sys.path),
        tuple(sys.meta_path),
        sys.excepthook,
        sys.getrecursionlimit(),
        frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        tuple(signal.getsignal(number) for number in _SIGNALS),
        _locale(),
        tuple(warnings.filters),
        tuple(logging.root.handlers) if logging else (),
        frozenset(threading.enumerate()),
        _processes(),
    )


@dataclass(slots=True)
class Remembered:
    """The state after one import, for the next one: what nobody changed need not be looked at twice."""

    state: ProcessState | None = None


@contextmanager
def observed(tell: Callable[[str], None], remembered: Remembered | None = None) -> Iterator[None]:
    """Tell what the body changes, and put back environment, folder, signal handlers, locale, filters and hooks."""
    remembered = remembered or Remembered()
    before = remembered.state or take_state()
    remembered.state = None
    try:
        yield
    finally:
        after = take_state()
        changes = list(_changes(before, after))
        remembered.state = None if changes else after
        for change in changes:
            tell(change)


def _changes(before: ProcessState, after: ProcessState) -> Iterator[str]:
    if after.environ != before.environ:
        yield f"changes the environment: {_names(_changed(before.environ, after.environ))}{PUT_BACK}"
        _put_environment_back(before.environ, after.environ)
    if after.folder != before.folder and before.folder is not None:
        yield f"changes the working folder to {quote(after.folder)}{PUT_BACK}"
        with contextlib.suppress(OSError):
            os.chdir(before.folder)
    if after.path != before.path:
        yield f"changes sys.path: {_names(quote(each) for each in {*before.path} ^ {*after.path}) or 'its order'}"
    if after.finders != before.finders:
        is_lost = any(each not in after.finders for each in before.finders)
        yield f"changes how Python finds modules (sys.meta_path){PUT_BACK if is_lost else ''}"
        if is_lost:
            sys.meta_path[:] = before.finders
    if after.excepthook is not before.excepthook:
        yield f"replaces sys.excepthook{PUT_BACK}"
        sys.excepthook = before.excepthook
    if after.recursion_limit != before.recursion_limit:
        yield f"sets the recursion limit to {after.recursion_limit}{PUT_BACK}"
        sys.setrecursionlimit(before.recursion_limit)
    if after.blocked != before.blocked:
        yield f"blocks signals{PUT_BACK}"
        signal.pthread_sigmask(signal.SIG_SETMASK, before.blocked)
    yield from _handlers(before, after)
    if after.locale != before.locale:
        yield f"changes the locale to {quote(after.locale)}{PUT_BACK}"
        _set_locale(before.locale)
    if not _only_adds_its_own(before.filters, after.filters):
        yield f"changes the filters of warnings{PUT_BACK}"
        _set_filters(before.filters)
    if after.log_handlers != before.log_handlers:
        yield "configures the root logger"
    yield from _left_running(before, after)


def _handlers(before: ProcessState, after: ProcessState) -> Iterator[str]:
    changed = [
        (number, old)
        for number, old, new in zip(_SIGNALS, before.handlers, after.handlers, strict=True)
        if old is not new and old != new
    ]
    for number, old in changed:
        if old is not None:  # set by C, and not ours to know
            signal.signal(number, old)
    if changed:
        names = [signal.Signals(number).name if number in _NAMED else str(number) for number, _ in changed]
        yield f"handles signals: {_names(names)}{PUT_BACK}"


_NAMED: Final = frozenset(int(each) for each in signal.Signals)


def _left_running(before: ProcessState, after: ProcessState) -> Iterator[str]:
    threads = sorted(cut(thread.name, 60) for thread in after.threads - before.threads)
    if threads:
        yield f"starts {len(threads)} thread(s): {_names(threads)}"
    processes = sorted(after.processes - before.processes)
    if processes:
        yield f"starts {len(processes)} process(es): {_names(map(str, processes))}"


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return sorted(cut(name, 60) for name in {*before, *after} if before.get(name) != after.get(name))


def _names(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _NAMES_SHOWN} more" if len(every) > _NAMES_SHOWN else ""
    return ", ".join(every[:_NAMES_SHOWN]) + more


def _put_environment_back(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    for name in after:
        if name not in before:
            del os.environ[name]
    for name, value in before.items():
        if after.get(name) != value:
            os.environ[name] = value


def _only_adds_its_own(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether what is new is about certain messages, modules or own categories, as libraries speak of themselves."""
    new = [each for each in after if each not in before]
    return all(each in after for each in before) and all(
        message or module or category.__module__ != "builtins" for _, message, category, module, _ in new
    )


def _set_filters(filters: tuple[Any, ...]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    getattr(warnings, "_filters_mutated", lambda: None)()  # what was decided by the other ones is decided anew


def _folder() -> str | None:
    with contextlib.suppress(OSError):
        return os.getcwd()
    return None


def _locale() -> str:
    import locale

    return locale.setlocale(locale.LC_ALL)


def _set_locale(value: str) -> None:
    import locale

    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, value)


def _processes() -> frozenset[int]:
    """Children of this thread; none where the kernel does not list them."""
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"/proc/self/task/{threading.get_native_id()}/children") as file,
    ):
        return frozenset(map(int, file.read().split()))
    return frozenset()
