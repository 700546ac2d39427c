"""Loads plugins in processes of their own, so that whatever they do harms nothing here."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvferry.registry.isolation import Call, Ending, call_isolated
from kvferry.registry.records import Origin, PluginRecord, State

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Declared:
    """What a plugin declares: a backend, a runtime or a manager."""

    kind: str
    """``backend``, ``runtime`` or ``manager``."""
    name: str
    requires: tuple[str, ...]
    missing: tuple[str, ...]
    """Of those, the ones that are not installed here."""
    install: str
    probe: str = ""
    """Of a backend."""
    deprecated: str | None = None


@dataclass(frozen=True, slots=True)
class Inspected:
    """One plugin as it came out of a process of its own."""

    record: PluginRecord
    declared: tuple[Declared, ...] = ()
    problems: tuple[str, ...] = ()
    """What is wrong with its declarations, though it loads."""
    new_modules: frozenset[str] = frozenset()
    """Top-level modules that its import brought in."""
    crashed: bool = False
    """Whether it took its process along, or never ended."""


def inspect_plugin(record: PluginRecord, *, timeout: float = TIMEOUT_SECONDS) -> PluginRecord:
    """Import and register one plugin in a subprocess and return its record as it came out."""
    return inspect_plugins([record], timeout=timeout)[0].record


def inspect_plugins(
    records: Iterable[PluginRecord],
    *,
    timeout: float = TIMEOUT_SECONDS,
    on_end: Callable[[Sequence[str]], None] = lambda names: None,
) -> list[Inspected]:
    """Import and register plugins, each in a process of its own; the built-in ones share one, unless it fails.

    Args:
        records: what a survey left ``discovered``.
        timeout: seconds that a process may take.
        on_end: told the names that are done, as it comes.
    """
    todo = list(records)
    builtin = [record for record in todo if record.origin is Origin.BUILTIN]
    groups = [builtin, *([record] for record in todo if record not in builtin)]
    done = _inspect([group for group in groups if group], timeout, on_end)
    again = [[one.record] for one in done if one.crashed and len(builtin) > 1 and one.record.origin is Origin.BUILTIN]
    by_name = {one.record.name: one for one in (*done, *_inspect(again, timeout, on_end))}
    return [by_name[record.name] for record in todo]


def _inspect(
    groups: Sequence[Sequence[PluginRecord]], timeout: float, on_end: Callable[[Sequence[str]], None]
) -> list[Inspected]:
    calls = [Call(f"{__name__}:inspect_here", ([_plain(record) for record in group],)) for group in groups]
    names = {id(call): [record.name for record in group] for call, group in zip(calls, groups, strict=True)}
    endings = call_isolated(calls, timeout=timeout, on_end=lambda call, _: on_end(names[id(call)]))
    return [
        inspected
        for group, ending in zip(groups, endings, strict=True)
        for inspected in (_crashed(group, ending) if ending.failure else map(_inspected, group, ending.value))
    ]


def _crashed(group: Sequence[PluginRecord], ending: Ending) -> list[Inspected]:
    last = f": {ending.output[-1]}" if ending.output else ""
    return [
        Inspected(
            replace(
                record,
                state=State.FAILED,
                stage="import",
                reason=f"the import of {record.entry_point} {ending.failure}{last}",
            ),
            crashed=True,
        )
        for record in group
    ]


# --- in the other process ---------------------------------------------------------------------------------------


def inspect_here(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Import and register plugins in this process, each for itself, and describe them as JSON."""
    return [_inspect_here(_record(plain)) for plain in records]


def _inspect_here(record: PluginRecord) -> dict[str, Any]:
    from kvferry.registry.guard import Guard, limit_here
    from kvferry.registry.load import register_all
    from kvferry.registry.selection import Selection

    before = set(sys.modules)
    registry = register_all(Selection((record,)), {}, guard=Guard(limit_here(), tells_crashes=False))
    new_modules = {name.partition(".")[0] for name in set(sys.modules) - before}
    return {
        "record": _plain(registry.records()[0]),
        "declared": [_declared(each) for each in registry.declarations_of(record.name)],
        "problems": list(registry.broken_declarations(record.name)),
        "new_modules": sorted(new_modules),
    }


def _declared(declaration: Any) -> dict[str, Any]:
    from kvferry.registry.availability import missing_modules
    from kvferry_plugins.types import TransceiverRuntime, TransferBackend

    kinds = ((TransferBackend, "backend"), (TransceiverRuntime, "runtime"))
    return asdict(
        Declared(
            kind=next((kind for each, kind in kinds if isinstance(declaration, each)), "manager"),
            name=declaration.name,
            requires=tuple(declaration.requires),
            missing=missing_modules(declaration.requires),
            install=declaration.install,
            probe=getattr(declaration, "probe", ""),
            deprecated=getattr(declaration, "deprecated", None),
        )
    )


# --- both spell it alike ----------------------------------------------------------------------------------------


def _plain(record: PluginRecord) -> dict[str, Any]:
    return asdict(record)


def _record(plain: Mapping[str, Any]) -> PluginRecord:
    from kvferry.registry.answers import Rank

    kinds = {"origin": Origin(plain["origin"]), "rank": Rank(plain["rank"]), "state": State(plain["state"])}
    lists = {name: tuple(plain[name]) for name in ("causes", "hooks", "conduct")}
    return PluginRecord(**{**plain, **kinds, **lists})


def _inspected(record: PluginRecord, plain: Mapping[str, Any]) -> Inspected:
    declared = (
        Declared(**{**each, "requires": tuple(each["requires"]), "missing": tuple(each["missing"])})
        for each in plain["declared"]
    )
    return Inspected(
        _record(plain["record"]), tuple(declared), tuple(plain["problems"]), frozenset(plain["new_modules"])
    )
