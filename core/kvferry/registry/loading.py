"""Imports one plugin and registers it; whatever it does instead becomes a record, never an end."""

import contextlib
import importlib
import itertools
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pluggy

from kvferry.registry.guard import Guard
from kvferry.registry.quoting import message_of, quote
from kvferry.registry.records import PluginRecord, State
from kvferry.registry.registration import NotAPluginError, register
from kvferry.registry.time_limits import TimeIsUpError


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plugin after the attempt to load it."""

    record: PluginRecord
    new_modules: frozenset[str] = frozenset()
    """Top-level modules that its import brought into the process."""


def load_plugin(
    manager: pluggy.PluginManager, record: PluginRecord, plugin: object = None, guard: Guard | None = None
) -> Loaded:
    """Import what the record names (unless the object is given) and register it.

    Args:
        manager: where it is registered.
        record: the plugin.
        plugin: itself, where it need not be imported.
        guard: watches it; None = it is trusted with this process.
    """
    if guard is None:
        # What a plugin prints must not end up in the middle of a verb's JSON.
        with contextlib.redirect_stdout(sys.stderr):
            return _load(manager, record, plugin)
    conduct: list[str] = []
    try:
        with guard.importing(record, conduct.append):
            loaded = _load(manager, record, plugin)
    except TimeIsUpError as error:  # between two statements of ours
        loaded = Loaded(_failed(record, "import", error, 0.0))
    return replace(loaded, record=replace(loaded.record, conduct=tuple(conduct)))


def _load(manager: pluggy.PluginManager, record: PluginRecord, plugin: object) -> Loaded:
    last_module = next(reversed(sys.modules))
    started = time.perf_counter()
    if plugin is None:
        try:
            plugin = import_object(record.entry_point)
        except BaseException as error:
            return Loaded(_failed(record, "import", error, time.perf_counter() - started))
    seconds = time.perf_counter() - started
    new_modules = _modules_after(last_module)
    try:
        hooks = register(manager, plugin, record.name)
    except BaseException as error:
        return Loaded(_failed(record, "registration", error, seconds), new_modules)
    return Loaded(replace(record, state=State.ACTIVE, import_seconds=seconds, hooks=hooks), new_modules)


def import_object(value: str) -> object:
    """Import ``module`` or ``module:attribute.attribute``."""
    module, _, attributes = value.partition(":")
    found: object = importlib.import_module(module.strip())
    for name in filter(None, attributes.split("[")[0].strip().split(".")):
        found = getattr(found, name)
    return found


def cause_chain(error: BaseException) -> tuple[str, ...]:
    """Name an error and what caused it, outermost first, each ``Type: message``."""
    return tuple(f"{type(each).__name__}: {message_of(each)}".rstrip(": ") for each in _chain(error))


def _failed(record: PluginRecord, stage: str, error: BaseException, seconds: float) -> PluginRecord:
    if isinstance(error, KeyboardInterrupt):
        raise error
    causes = cause_chain(error)
    return replace(
        record,
        state=State.FAILED,
        stage=stage,
        reason=_reason(record, stage, error),
        causes=causes,
        import_seconds=seconds,
    )


def _reason(record: PluginRecord, stage: str, error: BaseException) -> str:
    if isinstance(error, NotAPluginError):
        return f"{record.entry_point} {error}"
    if isinstance(error, SystemExit):
        return f"the {stage} of {record.entry_point} called sys.exit({quote(error.code)})"
    if isinstance(error, TimeIsUpError):
        return f"the {stage} of {record.entry_point} {message_of(error)}{_place(error)}"
    return f"the {stage} of {record.entry_point} raised {cause_chain(error)[0]}"


def _place(error: BaseException) -> str:
    """Where an interrupted import was; the last frame is the interruption itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][:-1]
    return f"; it was in {frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _modules_after(last: str) -> frozenset[str]:
    """Top-level modules that came after ``last``: whatever their number before, only the new ones are looked at."""
    new = itertools.takewhile(lambda name: name != last, reversed(list(sys.modules)))
    return frozenset(name.partition(".")[0] for name in new)
