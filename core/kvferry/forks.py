"""What must not live on in a fork: transceivers and agents, whose threads, sockets and connections stay behind.

Whoever makes one says so with ``guard``. In the child of a fork its methods are refused, its end touches nothing, and
nothing new can be built; the parent goes on, and its log says once that it was forked.
"""

import logging
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from kvferry_plugins.errors import ForkedProcessError
from kvferry_plugins.transceiver import KvCacheTransceiver, TransferAgent

logger = logging.getLogger("kvferry")

T = TypeVar("T", bound=KvCacheTransceiver | TransferAgent)

ENDINGS = ("shutdown", "close")
"""Methods that do nothing in a child: what they would end is the parent's."""

ADVICE = (
    "threads, ZeroMQ's sockets and a transport's connections do not survive a fork: start the child with "
    "multiprocessing's spawn or subprocess, or fork before anything is built and build in the child"
)


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a guarded object is, for the errors of a child."""

    what: str
    """``transceiver`` or ``transfer agent``."""
    runtime: str
    backend: str
    plugin: str | None = None
    """Who made it, where that is known."""
    distribution: str | None = None
    """As printed: ``acme-kvferry 1.0``."""

    def __str__(self) -> str:
        who = f" (plugin {self.plugin!r}, {self.distribution})" if self.plugin else ""
        return f"the {self.what} of runtime {self.runtime} on backend {self.backend}{who}"


class _Process:
    """This process's guarded objects, and those that it inherited by being forked."""

    def __init__(self) -> None:
        self.watches = False
        self.alive: dict[int, tuple[weakref.ref[Any], Guarded]] = {}
        """By identity: what a plugin makes need not have a hash."""
        self.ever: dict[str, Guarded] = {}
        """What there was, whether or not it is shut down: threads of torch's, which it made, outlive it."""
        self.warned = False
        self.pid = 0
        """Who is about to be forked."""
        self.parent = 0
        """Who was forked while something was alive; 0 = nobody."""
        self.inherited: tuple[Guarded, ...] = ()
        self.runs_a_program = False
        """Whether the fork under way is one that ``subprocess`` makes to run another program."""
        self.keep: Callable[[object], None] = lambda thing: None


_process = _Process()


def guard(thing: T, guarded: Guarded) -> T:
    """Have a fork of this process refused from now on, for as long as ``thing`` is there and not ``released``.

    Args:
        thing: a transceiver or an agent; the same one again takes the better description.
        guarded: what it is.
    """
    if not _process.watches:
        _watch()
    key = id(thing)
    known = _process.alive.get(key)
    if known is None or known[1].plugin is None:
        _process.alive[key] = weakref.ref(thing, lambda _: _process.alive.pop(key, None)), guarded
        if known is not None:
            _process.ever.pop(str(known[1]), None)
        _process.ever[str(guarded)] = guarded
    return thing


def released(thing: object) -> None:
    """Hear that an object is shut down: a fork is not warned of any more, and cannot use it anyway."""
    _process.alive.pop(id(thing), None)


def require_no_parent() -> None:
    """Refuse to build anything in a fork of a process that had: torch would wait for threads that are not there.

    Raises:
        ForkedProcessError: it is one.
    """
    if _process.inherited:
        _refuse(_process.inherited, "build")


def _watch() -> None:
    import ctypes  # here, since commands that build nothing have no time for it

    _process.watches = True
    increment = ctypes.pythonapi.Py_IncRef
    increment.argtypes = [ctypes.py_object]
    _process.keep = increment
    os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def _before_fork() -> None:
    """``subprocess`` forks in Python's sight only where it is given a ``preexec_fn``."""
    _process.pid = os.getpid()
    _process.runs_a_program = _called_from("subprocess", "_execute_child")


def _called_from(module: str, function: str) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return True
    return False


def _after_in_parent() -> None:
    if _process.runs_a_program or _process.warned or not _process.alive:
        return
    _process.warned = True
    listed = " and ".join(sorted({str(guarded) for _, guarded in _process.alive.values()}))
    logger.warning("this process (%d) was forked beside %s; the child cannot use them: %s", os.getpid(), listed, ADVICE)


def _after_in_child() -> None:
    """Make what the parent has unusable here; nothing of it is touched, nor destroyed when this process ends."""
    if _process.runs_a_program or not _process.ever:
        return
    alive, _process.alive = list(_process.alive.values()), {}
    if not _process.inherited:  # else this is a fork's fork
        _process.parent = _process.pid
        _process.inherited = tuple(guarded for _, guarded in alive) or tuple(_process.ever.values())
    for reference, guarded in alive:
        thing = reference()
        if thing is not None:
            _process.keep(thing)
            for name in _methods(type(thing)):
                vars(thing)[name] = _nothing if name in ENDINGS else _refusal(guarded, name)
            vars(thing)["memory_in_use"] = f"it belongs to process {_process.parent}, of which this is a fork"


def _methods(kind: type) -> list[str]:
    """Public methods, those of the contract's classes too."""
    return [
        name
        for name in dir(kind)
        if not name.startswith("_") and callable(getattr(kind, name)) and not isinstance(getattr(kind, name), type)
    ]


def _nothing(*arguments: Any, **keywords: Any) -> None:
    return None


def _refusal(guarded: Guarded, method: str) -> Callable[..., NoReturn]:
    def refused(*arguments: Any, **keywords: Any) -> NoReturn:
        _refuse((guarded,), method)

    return refused


def _refuse(things: tuple[Guarded, ...], method: str) -> NoReturn:
    first = next((each for each in things if each.what == "transceiver"), things[0])
    listed = " and ".join(sorted(set(map(str, things))))
    raise ForkedProcessError(
        f"{method} was called in process {os.getpid()}, a fork of process {_process.parent}, which had built {listed}; "
        f"{ADVICE}",
        parent=_process.parent,
        runtime=first.runtime,
        backend=first.backend,
        plugin=first.plugin,
        distribution=first.distribution,
    )
