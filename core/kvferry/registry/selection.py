"""Which of the found plugins stay: toggles applied to entries. Pure; imports no plugin."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvferry.registry.discovery import Entry, normalise
from kvferry.registry.names import nearest
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
    """Find a plugin by its name or as ``distribution:name``. Raises ConfigError."""
    by_name = {record.name: record for record in records}
    distribution, _, plain = name.rpartition(":")
    qualified = f"{normalise(distribution)}:{plain}"
    for record in by_name.values():
        if name == record.name or qualified == qualified_name(record):
            return record
    contenders = [repr(each) for each in by_name if each.endswith(f":{name}")]
    if contenders:
        raise ConfigError(f"{name!r} is claimed by {len(contenders)} distributions; write {' or '.join(contenders)}")
    raise ConfigError(f"there is no plugin {name!r}; {nearest(name, by_name)}")


def qualified_name(record: PluginRecord) -> str:
    """``distribution:name``, which only one plugin has."""
    return f"{normalise(record.distribution)}:{record.name.rpartition(':')[2]}"


class _Selector:
    def __init__(self, entries: Iterable[Entry], is_importable: Callable[[str], bool]) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._by_qualified = {entry.qualified_name: entry.name for entry in self._entries.values()}
        self._is_importable = is_importable
        self._enabled: dict[str, bool] = {}
        self._decided_by: dict[str, str] = {}
        self._asked_by_flag: set[str] = set()
        self._injected: dict[str, list[str]] = {}
        self._required: dict[str, Required] = {}
        self._prefer: dict[str, str] = {}
        self._prefer_by: dict[str, str] = {}
        self._warnings: list[str] = []
        self._errors: list[ConfigError] = []

    def inject(self, layer: Layer) -> None:
        """Make known what only a flag brings: lower layers may require or prefer it."""
        for name in layer.enable if layer.is_flag else ():
            if name.startswith("module:") or not self._find(name):
                self._inject(name)

    def apply(self, layer: Layer) -> None:
        if layer.external_only is not None:
            self._keep_only(layer, layer.external_only)
        for name in layer.enable:
            self._enable(layer, name)
        for name in layer.disable:
            self._disable(layer, name)
        for name in layer.required:
            for found in self._one(layer, name, "required"):
                self._required.setdefault(found, Required(found, layer.source))
        for question, name in layer.prefer.items():
            for found in self._one(layer, name, f"prefer.{question}"):
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
        for found in self._one(layer, name, "enable"):
            self._decide(found, True, layer)

    def _disable(self, layer: Layer, name: str) -> None:
        found = self._find(name)
        if not found:
            self._report_unknown(layer, name, "disable", is_error=layer.is_flag)
        for each in found:
            self._decide(each, False, layer)

    def _decide(self, name: str, enabled: bool, layer: Layer) -> None:
        self._enabled[name] = enabled
        self._decided_by[name] = layer.source
        if enabled and layer.is_flag:
            self._asked_by_flag.add(name)
        else:
            self._asked_by_flag.discard(name)

    def _one(self, layer: Layer, name: str, key: str) -> list[str]:
        found = self._find(name)
        if layer.is_flag and key == "enable" and (name.startswith("module:") or not found):
            found = self._inject(name)
        if not found:
            self._report_unknown(layer, name, key, is_error=True)
        if len(found) > 1:
            listed = " or ".join(repr(each) for each in found)
            message = f"{layer.source}: {key} names {name!r}, which {len(found)} distributions claim; write {listed}"
            self._errors.append(ConfigError(message, setting=f"plugins.{key}"))
            return []
        return found

    def _find(self, name: str) -> list[str]:
        if name in self._entries:
            return [name]
        distribution, colon, plain = name.partition(":")
        qualified = f"{normalise(distribution)}:{plain}"
        if colon and qualified in self._by_qualified:
            return [self._by_qualified[qualified]]
        return sorted(entry.name for entry in self._entries.values() if entry.contested and entry.plain_name == name)

    def _inject(self, flag: str) -> list[str]:
        if flag not in self._injected:
            self._injected[flag] = self._new_entry(flag)
        return self._injected[flag]

    def _new_entry(self, flag: str) -> list[str]:
        module = flag.removeprefix("module:").strip()
        if not self._is_importable(module):
            return []
        name = module if module not in self._entries else f"module:{module}"
        self._entries.setdefault(name, Entry(name, name, INJECTED, None, module, Origin.INJECTED))
        return [name]

    def _report_unknown(self, layer: Layer, name: str, key: str, *, is_error: bool) -> None:
        message = (
            f"{layer.source}: {key} names the plugin {name!r}, which is not installed; {nearest(name, self._entries)}"
        )
        if is_error:
            self._errors.append(ConfigError(message, setting=f"plugins.{key}"))
        else:
            self._warnings.append(message)

    def _record(self, entry: Entry) -> PluginRecord:
        state, reason, stage = self._state(entry)
        injected = entry.name in self._asked_by_flag
        return PluginRecord(
            name=entry.name,
            distribution=entry.distribution,
            version=entry.version,
            entry_point=entry.value,
            origin=entry.origin,
            rank=RANK_OF_ORIGIN[Origin.INJECTED if injected else entry.origin],
            state=state,
            reason=reason,
            decided_by=self._decided_by.get(entry.name),
            stage=stage,
        )

    def _state(self, entry: Entry) -> tuple[State, str | None, str | None]:
        enabled = self._enabled.get(entry.name)
        if enabled is False:
            return State.DISABLED, f"by {self._decided_by[entry.name]}", None
        if entry.contested and enabled is None:
            return State.FAILED, entry.contested, "discovery"
        return State.DISCOVERED, None, None
