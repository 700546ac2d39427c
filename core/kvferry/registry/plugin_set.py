"""Which plugins are on, and what each consists of: from metadata and files alone."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from importlib_metadata import Distribution

from kvferry.registry.discovery import Discovery, discover, normalise
from kvferry.registry.door import Registry
from kvferry.registry.plugin_files import PluginFiles, files_of_distribution, files_of_module, module_of
from kvferry.registry.records import INJECTED, PluginRecord, State

_SHORT = len("sha256:") + 16


@dataclass(frozen=True, slots=True)
class KnownPlugin:
    """One plugin as a lock describes it."""

    name: str
    distribution: str
    """``(injected)`` for a module that no distribution brought."""
    version: str
    """Empty where there is none."""
    entry_point: str
    digest: str
    """Of the distribution's files; empty where there are none to read."""
    editable: bool = False

    @property
    def printed_distribution(self) -> str:
        """``acme-kvferry 1.0``, or ``(injected)``."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def short_digest(self) -> str:
        """What two workers compare: enough to tell files apart, and to be read."""
        return self.digest[:_SHORT]


_AS_LOADED: dict[tuple[str, str, str], PluginFiles] = {}


def files_as_loaded(distribution: Distribution) -> PluginFiles:
    """Read a distribution's files the first time that this process asks: what it has imported does not change later."""
    key = (str(distribution.locate_file("")), distribution.name, distribution.version)
    if key not in _AS_LOADED:
        _AS_LOADED[key] = files_of_distribution(distribution)
    return _AS_LOADED[key]


class FilesReader:
    """Reads the files of each distribution once.

    Args:
        discovery: where the distributions are.
        read: how one is read.
    """

    def __init__(
        self, discovery: Discovery, read: Callable[[Distribution], PluginFiles] = files_of_distribution
    ) -> None:
        self._distributions = discovery.distributions
        self._read_distribution = read
        self._read: dict[tuple[str, bool], PluginFiles | None] = {}

    def files_of(self, record: PluginRecord) -> PluginFiles | None:
        """What the plugin's distribution consists of; None where nothing of it is on disk."""
        injected = record.distribution == INJECTED
        name = module_of(record.entry_point) if injected else normalise(record.distribution)
        if (name, injected) not in self._read:
            self._read[name, injected] = files_of_module(name) if injected else self._files(name)
        return self._read[name, injected]

    def _files(self, distribution: str) -> PluginFiles | None:
        found = self._distributions.get(distribution)
        return self._read_distribution(found) if found is not None else None


def known_plugins(records: Iterable[PluginRecord], reader: FilesReader) -> tuple[KnownPlugin, ...]:
    """Describe the plugins that are on, sorted by name."""
    on = (record for record in records if record.state is State.DISCOVERED or record.is_active)
    return tuple(_known(record, reader.files_of(record)) for record in sorted(on, key=lambda record: record.name))


def _known(record: PluginRecord, files: PluginFiles | None) -> KnownPlugin:
    return KnownPlugin(
        name=record.name,
        distribution=record.distribution,
        version=record.version or "",
        entry_point=record.entry_point,
        digest=files.digest if files else "",
        editable=files.editable if files else False,
    )


def plugin_digests(registry: Registry, discovery: Discovery | None = None) -> dict[str, str]:
    """Shorten the digests of the plugins of ``Registry.plugin_set``, which two workers compare.

    Args:
        registry: whose models and backends are meant.
        discovery: where their distributions are; None = looked for now.
    """
    reader = FilesReader(discovery or discover(), files_as_loaded)
    compared = registry.plugin_set()
    known = known_plugins((record for record in registry.records() if record.name in compared), reader)
    return {each.name: each.short_digest for each in known if each.digest}


def plugin_set_digest(registry: Registry, digests: Mapping[str, str] | None = None) -> str:
    """One digest of names, distributions, versions and files of the plugins that two workers compare.

    Args:
        registry: whose models and backends are meant.
        digests: from ``plugin_digests``, where they are known already.
    """
    files = plugin_digests(registry) if digests is None else digests
    return digest_of([[name, printed, files.get(name, "")] for name, printed in sorted(registry.plugin_set().items())])


def digest_of(value: object) -> str:
    """Digest plain values by their canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
