"""Stands between a command and the plugins that it loads and asks: time, output, forks and the process's state."""

import atexit
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NoReturn, TypeVar

from kvferry.registry.conduct import PUT_BACK, Remembered, observed
from kvferry.registry.diversion import Diversion
from kvferry.registry.quoting import quote
from kvferry.registry.records import Origin, PluginRecord
from kvferry.registry.time_limits import LIMIT_SECONDS, WATCHDOG_NAME, TimeLimit
from kvferry_plugins.errors import ConfigError

T = TypeVar("T")

LIMIT_VARIABLE: Final = "KVFERRY_PLUGIN_IMPORT_SECONDS"
FORKED_STATUS: Final = 71
"""How a child ends that a plugin forks while it is imported or asked."""
END_SECONDS: Final = 5.0
"""For what plugins want to be called when the process ends."""


def limit_seconds(environ: Mapping[str, str]) -> float:
    """Read how long an import, or a hook that is asked while resolving, may take. Raises ConfigError."""
    text = environ.get(LIMIT_VARIABLE, "").strip()
    try:
        seconds = float(text) if text else LIMIT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(
            f"{LIMIT_VARIABLE} is {quote(text)}, and must be a number of seconds above 0; "
            f"unset it for {LIMIT_SECONDS:g}",
            setting=LIMIT_VARIABLE,
        )
    return seconds


def limit_here() -> float:
    """The limit in a process that a command has started, which has reported a wrong one itself."""
    try:
        return limit_seconds(os.environ)
    except ConfigError:
        return LIMIT_SECONDS


class Guard:
    """For a process whose only thread loads the plugins: a command, or the child that inspects one.

    A host engine that loads a registry of its own does without: a guard diverts the process's output, uses its alarm
    and puts its environment back.

    Args:
        seconds: that an import, or an answer of a hook, may take.
        tells_crashes: whether Python says on stderr where a crash was; no matter where another process tells it.
    """

    def __init__(self, seconds: float = LIMIT_SECONDS, *, tells_crashes: bool = True) -> None:
        self._tells_crashes = tells_crashes
        self._limit = TimeLimit(seconds)
        self._diversion = Diversion()
        self._remembered = Remembered()
        self._is_watching = False
        self._known_threads = set(threading.enumerate())
        self.notes: dict[str, None] = {}
        """What hooks printed while they were asked, a sentence each, in order."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch whatever is imported or asked inside, as long as this process has no other thread. May be nested."""
        if self._is_watching or not self._is_alone():
            yield
            return
        self._is_watching = True
        try:
            with self._diversion.open(), self._limit.armed(), _no_ends(self._tells_crashes), _no_forks():
                yield
                _flush_native_output()
        finally:
            self._is_watching = False

    @contextmanager
    def importing(self, record: PluginRecord, tell: Callable[[str], None]) -> Iterator[None]:
        """Watch the import of a plugin and tell what it does beside; our own are only limited in time."""
        self._diversion.take()
        self._limit.begin("import", record)
        try:
            if record.origin is Origin.BUILTIN:
                self._remembered.state = None
                yield
            else:
                yield from self._watch_import(record, tell)
        finally:
            self._limit.end()
            if self._diversion.put_streams_back():
                tell(f"replaces sys.stdout or sys.stderr{PUT_BACK}")
            if printed := self._diversion.take():
                tell(f"prints {printed:,} characters")

    def ask(self, record: PluginRecord, hook: str, question: Callable[[], T]) -> T:
        """Ask a hook, limited in time; what it prints is noted."""
        if not self._is_watching:
            return question()
        self._limit.begin(hook, record)
        try:
            return question()
        finally:
            self._limit.end()
            if _forks:
                self._note(record, f"its hook {hook} {_told_forks()}")
            if self._diversion.has_output and (printed := self._diversion.take()):
                self._note(record, f"its hook {hook} prints {printed:,} characters when it is asked; log instead")

    def _note(self, record: PluginRecord, what: str) -> None:
        self.notes[f"plugin {record.name!r} ({record.printed_distribution}): {what}"] = None

    def _watch_import(self, record: PluginRecord, tell: Callable[[str], None]) -> Iterator[None]:
        callbacks = _exit_callbacks()
        with observed(tell, self._remembered):
            try:
                yield
            finally:
                self._limit.end()  # what follows is not the plugin's time
                if _forks:
                    tell(_told_forks())
        if _exit_callbacks() > callbacks:
            _called_at_exit.append(f"{record.name!r} ({record.printed_distribution})")
        new = set(threading.enumerate()) - self._known_threads
        _stray.update(thread for thread in new if not thread.daemon)
        self._known_threads |= new

    def _is_alone(self) -> bool:
        others = set(threading.enumerate()) - self._known_threads
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and all(thread.name == WATCHDOG_NAME for thread in others)


# --- forks and ends --------------------------------------------------------------------------------------------------

_forks: list[int] | None = None
"""Ids of the processes that have forked since it was told; None = nobody is watched."""
_is_registered = False
_exit = os._exit


@contextmanager
def _no_forks() -> Iterator[None]:
    """End at once every child that is forked inside: it must not go on as a second command."""
    global _forks, _is_registered
    if not _is_registered:
        os.register_at_fork(before=_note_fork, after_in_child=_end_child)
        _is_registered = True
    parent, _forks = os.getpid(), []
    try:
        yield
    finally:
        if os.getpid() != parent:  # forked by native code
            _exit(FORKED_STATUS)
        _forks = None


def _note_fork() -> None:
    if _forks is not None:
        _forks.append(os.getpid())


def _end_child() -> None:
    if _forks is not None:
        _exit(FORKED_STATUS)


def _told_forks() -> str:
    assert _forks is not None
    number = len(_forks)
    _forks.clear()
    return f"forks {number} time(s) (the child was ended)"


class PythonEndedError(BaseException):
    """Raised in the place of an end of this process, which would be the command's."""


@contextmanager
def _no_ends(tells_crashes: bool) -> Iterator[None]:
    """Refuse ``os._exit``; of a crash let Python say at least in which file it was."""

    def refuse(status: int) -> NoReturn:
        raise PythonEndedError(f"os._exit({quote(status)}), which would have ended this command")

    tells_crashes = tells_crashes and not faulthandler.is_enabled()
    if tells_crashes:
        faulthandler.enable(2, all_threads=False)
    os._exit = refuse
    try:
        yield
    finally:
        os._exit = _exit
        if tells_crashes:
            faulthandler.disable()


# --- the end ---------------------------------------------------------------------------------------------------------


def _flush_native_output() -> None:
    """What C has printed and not yet written must not follow a command's answer."""
    if "ctypes" in sys.modules:
        sys.modules["ctypes"].CDLL(None).fflush(None)


_stray: set[threading.Thread] = set()
"""Threads that imports have left behind, which keep Python from ending."""


_called_at_exit: list[str] = []
"""Plugins whose imports have left functions that Python calls when it ends."""


def _exit_callbacks() -> int:
    return getattr(atexit, "_ncallbacks", lambda: 0)()


def end_despite_threads(status: object) -> None:
    """End the process here and now if threads that a plugin has left behind would keep it for ever.

    What a plugin wants to be called at the end has some time for it.

    Args:
        status: of the SystemExit that is on its way.
    """
    code = status if isinstance(status, int) else int(status is not None)
    is_kept = any(thread.is_alive() for thread in _stray)
    if not is_kept and not _called_at_exit:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if is_kept:
        _exit(code)
    threading.Thread(target=_end_after, args=(code,), name="kvferry-end", daemon=True).start()


def _end_after(code: int) -> None:
    time.sleep(END_SECONDS)
    text = (
        f"kvferry: what the import of plugin {', '.join(_called_at_exit)} has left to be called at the end takes more "
        f"than {END_SECONDS:g} s; this command ends without it\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    _exit(code)
