"""What a name in a toggle means: one plugin, all plugins of a distribution, or none."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.registry.discovery import BUILTIN_DISTRIBUTIONS, Entry, normalise
from kvferry.registry.names import nearest
from kvferry.registry.records import Origin, PluginRecord

ALL = "*"
"""``distribution:*`` means all its plugins, where its name alone is a plugin's too."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name stands for."""

    plugins: tuple[str, ...] = ()
    """Names as a registry knows them, sorted; several of different distributions = they contest it."""
    distribution: str | None = None
    """The one whose plugins they all are, where it is that which was named."""
    problem: str | None = None
    """Why it may not be named, though it is there."""


@dataclass(slots=True)
class PluginNames:
    """All names of the plugins that there are."""

    _names: set[str] = field(default_factory=set)
    _by_qualified: dict[str, str] = field(default_factory=dict)
    _contested: dict[str, list[str]] = field(default_factory=dict)
    _by_distribution: dict[str, list[str]] = field(default_factory=dict)
    _distributions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_entries(cls, entries: Iterable[Entry]) -> "PluginNames":
        """Know these."""
        names = cls()
        for entry in entries:
            names.add(entry.name, entry.plain_name, entry.distribution, entry.origin)
        return names

    @classmethod
    def of_records(cls, records: Iterable[PluginRecord]) -> "PluginNames":
        """Know these."""
        names = cls()
        for record in records:
            names.add(record.name, record.name.rpartition(":")[2], record.distribution, record.origin)
        return names

    def add(self, name: str, plain: str, distribution: str, origin: Origin) -> None:
        """Know one more."""
        self._names.add(name)
        if origin is Origin.INJECTED:
            return
        normal = normalise(distribution)
        self._by_qualified[f"{normal}:{plain}"] = name
        self._by_distribution.setdefault(normal, []).append(name)
        self._distributions[normal] = distribution
        if name != plain:
            self._contested.setdefault(plain, []).append(name)

    def meaning(self, name: str) -> Meaning:
        """Find what a name means: a plugin, ``distribution:name``, a contested name, a distribution; else nothing."""
        if name in self._names:
            return Meaning((name,))
        distribution, colon, plain = name.rpartition(":")
        if colon and plain != ALL:
            found = self._by_qualified.get(f"{normalise(distribution)}:{plain}")
            return Meaning((found,)) if found else Meaning()
        if name in self._contested:
            return Meaning(tuple(sorted(self._contested[name])))
        return self._all_of(distribution if colon else name)

    def nearest(self, name: str) -> str:
        """Suggest the nearest right name."""
        strangers = {each for normal, each in self._distributions.items() if normal not in BUILTIN_DISTRIBUTIONS}
        return nearest(name, sorted(self._names | strangers))

    def _all_of(self, distribution: str) -> Meaning:
        normal = normalise(distribution)
        if normal in self._by_distribution and normal in BUILTIN_DISTRIBUTIONS:
            return Meaning(problem=f"{distribution!r} is kvferry's own distribution: name its plugins one by one")
        return Meaning(tuple(sorted(self._by_distribution.get(normal, ()))), self._distributions.get(normal))
