"""Makes a registry: discovers, applies the toggles, imports what stays, and checks what was demanded."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pluggy

from kvferry.registry.availability import missing_modules
from kvferry.registry.discovery import discover
from kvferry.registry.door import Registry
from kvferry.registry.guard import Guard
from kvferry.registry.loading import Loaded, load_plugin
from kvferry.registry.records import Origin, PluginRecord, State
from kvferry.registry.registration import new_manager
from kvferry.registry.selection import Selection
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Toggles
from kvferry_plugins.errors import KvferryError, PluginLoadError, ResolutionError
from kvferry_plugins.types import TransferBackend


def load_registry(*, toggles: Toggles, paths: Sequence[str] | None = None, guard: Guard | None = None) -> Registry:
    """Discover, select, import and register; a plugin that fails is a record and a warning.

    Args:
        toggles: what turns plugins on and off.
        paths: where to look for distributions instead of ``sys.path``.
        guard: watches what plugins do to this process; for a command, which has no other thread.

    Raises:
        ConfigError: a toggle names a plugin that does not exist.
        PluginLoadError: a required or preferred plugin is not active, or any failed under ``strict``.
    """
    discovery = discover(paths)
    selection = survey(discovery, toggles)
    raise_all(selection.errors)
    registry = register_all(selection, {}, discovery.warnings, guard)
    raise_all([*_missing_required(registry, selection), *_failures(registry, toggles)])
    return registry


def register_all(
    selection: Selection,
    objects: Mapping[str, object],
    warnings: Iterable[str] = (),
    guard: Guard | None = None,
) -> Registry:
    """Load every discovered plugin of a selection, taking the objects that are given instead of importing."""
    with guard.watching() if guard else nullcontext():
        return _register_all(selection, objects, warnings, guard)


def _register_all(
    selection: Selection, objects: Mapping[str, object], warnings: Iterable[str], guard: Guard | None
) -> Registry:
    manager = new_manager()
    loaded = [_load(manager, record, objects.get(record.name), guard) for record in selection.records]
    registry = Registry(manager, [each.record for each in loaded], guard=guard)
    records = [_with_availability(registry, record) for record in registry.records()]
    told = [
        *(*warnings, *selection.warnings),
        *(*_failure_warnings(records), *_conduct_warnings(records), *_heavy_imports(registry, loaded)),
    ]
    return Registry(manager, records, prefer=selection.prefer, warnings=told, guard=guard)


def raise_all(errors: Sequence[KvferryError]) -> None:
    """Raise one error as itself, several as a ResolutionError."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ResolutionError(errors)


def _load(manager: pluggy.PluginManager, record: PluginRecord, plugin: object, guard: Guard | None) -> Loaded:
    return load_plugin(manager, record, plugin, guard) if record.state is State.DISCOVERED else Loaded(record)


def _with_availability(registry: Registry, record: PluginRecord) -> PluginRecord:
    if record.state is not State.ACTIVE:
        return record
    declared = registry.declarations_of(record.name)
    missing = [(each, missing_modules(each.requires)) for each in declared]
    if not declared or not all(modules for _, modules in missing):
        return record
    reasons = dict.fromkeys(
        f"{' and '.join(modules)} is not installed" + (f"; {each.install}" if each.install else "")
        for each, modules in missing
    )
    return replace(record, state=State.UNAVAILABLE, reason="; ".join(reasons))


def _failure_warnings(records: Iterable[PluginRecord]) -> list[str]:
    return [f"plugin {record.describe()}" for record in records if record.state is State.FAILED]


def _conduct_warnings(records: Iterable[PluginRecord]) -> list[str]:
    return [
        f"plugin {record.name!r} ({record.printed_distribution}): its import {'; it '.join(record.conduct)}; "
        "an import should do nothing of that, the hook that needs it may"
        for record in records
        if record.conduct
    ]


def _heavy_imports(registry: Registry, loaded: Iterable[Loaded]) -> list[str]:
    heavy = {"torch"}.union(*(each.requires for each in _backends(registry)))
    return [
        f"plugin {each.record.name!r} ({each.record.printed_distribution}) imports "
        f"{', '.join(sorted(heavy & each.new_modules))} when it is imported; import inside the hook that needs it"
        for each in loaded
        if each.record.origin is not Origin.BUILTIN and heavy & each.new_modules
    ]


def _backends(registry: Registry) -> list[TransferBackend]:
    declared = (each for record in registry.records() for each in registry.declarations_of(record.name))
    return [each for each in declared if isinstance(each, TransferBackend)]


def _missing_required(registry: Registry, selection: Selection) -> list[PluginLoadError]:
    demands = [(each.name, f"required by {each.by}") for each in selection.required]
    demands += [
        (name, f"preferred for {question} by {selection.prefer_by[question]}")
        for question, name in sorted(selection.prefer.items())
    ]
    return [
        _not_active(record, demand)
        for name, demand in demands
        if (record := registry.record(name)) is not None and not record.is_active
    ]


def _not_active(record: PluginRecord, demand: str) -> PluginLoadError:
    message = f"plugin {record.name!r} is {demand}, but {record.describe()}"
    return PluginLoadError(message, plugin=record.name, distribution=record.printed_distribution)


def _failures(registry: Registry, toggles: Toggles) -> list[PluginLoadError]:
    if not toggles.strict:
        return []
    return [
        PluginLoadError(
            f"plugin {record.describe()} (fatal under --strict-plugins)",
            plugin=record.name,
            distribution=record.printed_distribution,
        )
        for record in registry.records()
        if record.state is State.FAILED
    ]
