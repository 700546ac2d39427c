"""Which of the found plugins stay: toggles applied to entries. Pure; imports no plugin."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvferry.registry.discovery import Entry, normalise
from kvferry.registry.plugin_names import Meaning, PluginNames
from kvferry.registry.records import INJECTED, RANK_OF_ORIGIN, Origin, PluginRecord, State
from kvferry.registry.toggles import Layer, Toggles
from kvferry_plugins.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Required:
    """A plugin that must be active, and who says so."""

    name: str
    by: str


@dataclass(frozen=True, slots=True)
class Selection:
    """Records before any import, what is demanded of them, and what was odd."""

    records: tuple[PluginRecord, ...]
    required: tuple[Required, ...] = ()
    prefer: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    prefer_by: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    warnings: tuple[str, ...] = ()
    errors: tuple[ConfigError, ...] = ()


def select(entries: Iterable[Entry], toggles: Toggles, *, is_importable: Callable[[str], bool]) -> Selection:
    """Apply the toggles, lowest layer first."""
    selector = _Selector(entries, is_importable)
    for layer in toggles.layers:
        selector.inject(layer)
    for layer in toggles.layers:
        selector.apply(layer)
    return selector.selection()


def find_record(records: Iterable[PluginRecord], name: str) -> PluginRecord:
    """Find a plugin by name, ``distribution:name``, or a distribution that has no other. Raises ConfigError."""
    found = find_records(records, name)
    if len(found) > 1:
        listed = " or ".join(repr(each.name) for each in found)
        raise ConfigError(f"{name!r} is a distribution with {len(found)} plugins; write {listed}")
    return found[0]


def find_records(records: Iterable[PluginRecord], name: str) -> tuple[PluginRecord, ...]:
    """Find a plugin, or all that a distribution brings. Raises ConfigError."""
    by_name = {record.name: record for record in records}
    names = PluginNames.of_records(by_name.values())
    meaning = names.meaning(name)
    if meaning.problem:
        raise ConfigError(meaning.problem)
    if not meaning.plugins:
        raise ConfigError(f"there is no plugin {name!r}; {names.nearest(name)}")
    if len(meaning.plugins) > 1 and meaning.distribution is None:
        listed = " or ".join(map(repr, meaning.plugins))
        raise ConfigError(f"{name!r} is claimed by {len(meaning.plugins)} distributions; write {listed}")
    return tuple(by_name[each] for each in meaning.plugins)


def qualified_name(record: PluginRecord) -> str:
    """``distribution:name``, which only one plugin has."""
    return f"{normalise(record.distribution)}:{record.name.rpartition(':')[2]}"


class _Selector:
    def __init__(self, entries: Iterable[Entry], is_importable: Callable[[str], bool]) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._names = PluginNames.of_entries(self._entries.values())
        self._is_importable = is_importable
        self._enabled: dict[str, bool] = {}
        self._decided_by: dict[str, _Decider] = {}
        self._asked_by_flag: set[str] = set()
        self._injected: dict[str, tuple[str, ...]] = {}
        self._required: dict[str, Required] = {}
        self._prefer: dict[str, str] = {}
        self._prefer_by: dict[str, str] = {}
        self._warnings: list[str] = []
        self._errors: list[ConfigError] = []

    def inject(self, layer: Layer) -> None:
        """Make known what only a flag brings: lower layers may require or prefer it."""
        for name in layer.enable if layer.is_flag else ():
            if name.startswith("module:") or self._names.meaning(name) == Meaning():
                self._inject(name)

    def apply(self, layer: Layer) -> None:
        if layer.external_only is not None:
            self._keep_only(layer, layer.external_only)
        # Within a layer a plugin's own name beats its distribution's.
        moves = [*((self._enable, name) for name in layer.enable), *((self._disable, name) for name in layer.disable)]
        for move, name in sorted(moves, key=lambda move: self._names.meaning(move[1]).distribution is None):
            move(layer, name)
        for name in layer.required:
            for found in self._asked_for(layer, name, "required"):
                self._required.setdefault(found, Required(found, layer.source))
        for question, name in layer.prefer.items():
            for found in self._asked_for(layer, name, f"prefer.{question}"):
                self._prefer[question] = found
                self._prefer_by[question] = layer.source

    def selection(self) -> Selection:
        records = tuple(self._record(entry) for _, entry in sorted(self._entries.items()))
        return Selection(
            records,
            tuple(required for _, required in sorted(self._required.items())),
            MappingProxyType(self._prefer),
            MappingProxyType(self._prefer_by),
            tuple(self._warnings),
            tuple(self._errors),
        )

    def _keep_only(self, layer: Layer, names: Sequence[str]) -> None:
        for entry in self._entries.values():
            if entry.origin is Origin.EXTERNAL:
                self._decide(entry.name, False, layer)
        for name in names:
            self._enable(layer, name)

    def _enable(self, layer: Layer, name: str) -> None:
        for found in self._asked_for(layer, name, "enable"):
            self._decide(found, True, layer, self._names.meaning(name).distribution)

    def _disable(self, layer: Layer, name: str) -> None:
        meaning = self._names.meaning(name)
        if meaning.problem:
            self._errors.append(ConfigError(f"{layer.source}: {meaning.problem}", setting="plugins.disable"))
        elif not meaning.plugins:
            self._report_unknown(layer, name, "disable", is_error=layer.is_flag)
        for each in meaning.plugins:
            self._decide(each, False, layer, meaning.distribution)

    def _decide(self, name: str, enabled: bool, layer: Layer, distribution: str | None = None) -> None:
        self._enabled[name] = enabled
        self._decided_by[name] = _Decider(layer, distribution)
        if enabled and layer.is_flag:
            self._asked_by_flag.add(name)
        else:
            self._asked_by_flag.discard(name)

    def _asked_for(self, layer: Layer, name: str, key: str) -> Sequence[str]:
        """Name the plugins that a layer wants; what stands against it is an error."""
        meaning = self._names.meaning(name)
        if layer.is_flag and key == "enable" and (name.startswith("module:") or meaning == Meaning()):
            meaning = Meaning(self._inject(name))
        found = meaning.plugins
        if meaning.problem:
            self._errors.append(ConfigError(f"{layer.source}: {meaning.problem}", setting=f"plugins.{key}"))
        elif not found:
            self._report_unknown(layer, name, key, is_error=True)
        elif len(found) > 1 and (meaning.distribution is None or key.startswith("prefer")):
            listed = " or ".join(map(repr, found))
            which = "has several plugins" if meaning.distribution else f"{len(found)} distributions claim"
            self._refuse(layer, key, f"{name!r}, which {which}; write {listed}")
            return ()
        return found

    def _inject(self, flag: str) -> tuple[str, ...]:
        if flag not in self._injected:
            self._injected[flag] = self._new_entry(flag)
        return self._injected[flag]

    def _new_entry(self, flag: str) -> tuple[str, ...]:
        module = flag.removeprefix("module:").strip()
        if not self._is_importable(module):
            return ()
        name = module if module not in self._entries else f"module:{module}"
        self._entries.setdefault(name, Entry(name, name, INJECTED, None, module, Origin.INJECTED))
        self._names.add(name, name, INJECTED, Origin.INJECTED)
        return (name,)

    def _refuse(self, layer: Layer, key: str, problem: str) -> None:
        self._errors.append(ConfigError(f"{layer.source}: {key} names {problem}", setting=f"plugins.{key}"))

    def _report_unknown(self, layer: Layer, name: str, key: str, *, is_error: bool) -> None:
        if layer.is_flag and name.startswith("module:"):
            message = f"{layer.source}: there is no such module; is its folder in PYTHONPATH, or its package installed?"
        else:
            nearest = self._names.nearest(name)
            message = f"{layer.source}: {key} names the plugin {name!r}, which is not installed; {nearest}"
        if is_error:
            self._errors.append(ConfigError(message, setting=f"plugins.{key}"))
        else:
            self._warnings.append(message)

    def _record(self, entry: Entry) -> PluginRecord:
        state, reason, stage = self._state(entry)
        injected = entry.name in self._asked_by_flag
        decider = self._decided_by.get(entry.name)
        return PluginRecord(
            name=entry.name,
            distribution=entry.distribution,
            version=entry.version,
            entry_point=entry.value,
            origin=entry.origin,
            rank=RANK_OF_ORIGIN[Origin.INJECTED if injected else entry.origin],
            state=state,
            reason=reason,
            decided_by=decider.layer.source if decider else None,
            layer=decider.layer.kind if decider else None,
            stage=stage,
        )

    def _state(self, entry: Entry) -> tuple[State, str | None, str | None]:
        enabled = self._enabled.get(entry.name)
        if enabled is False:
            return State.DISABLED, f"by {self._decided_by[entry.name]}", None
        if entry.contested and enabled is None:
            return State.FAILED, entry.contested, "discovery"
        return State.DISCOVERED, None, None


@dataclass(frozen=True, slots=True)
class _Decider:
    layer: Layer
    distribution: str | None
    """The one that the layer names instead of the plugin."""

    def __str__(self) -> str:
        by = f", which names its distribution {self.distribution}" if self.distribution else ""
        return f"{self.layer.source}{by}"
