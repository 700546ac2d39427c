"""Imports one plugin and registers it; whatever it does instead becomes a record, never an end."""

import contextlib
import importlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pluggy

from kvferry.registry.records import PluginRecord, State
from kvferry.registry.registration import NotAPluginError, register


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plugin after the attempt to load it."""

    record: PluginRecord
    new_modules: frozenset[str] = frozenset()
    """Top-level modules that its import brought into the process."""


def load_plugin(manager: pluggy.PluginManager, record: PluginRecord, plugin: object = None) -> Loaded:
    """Import what the record names (unless the object is given) and register it."""
    before = _top_level_modules()
    started = time.perf_counter()
    if plugin is None:
        try:
            # What a plugin prints must not end up in the middle of a verb's JSON.
            with contextlib.redirect_stdout(sys.stderr):
                plugin = import_object(record.entry_point)
        except BaseException as error:
            return Loaded(_failed(record, "import", error, time.perf_counter() - started))
    seconds = time.perf_counter() - started
    new_modules = _top_level_modules() - before
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
    return tuple(f"{type(each).__name__}: {each}".rstrip(": ") for each in _chain(error))


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
        return f"the {stage} of {record.entry_point} called sys.exit({error.code!r})"
    return f"the {stage} of {record.entry_point} raised {cause_chain(error)[0]}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _top_level_modules() -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in list(sys.modules))
