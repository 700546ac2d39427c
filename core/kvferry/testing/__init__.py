"""What a harness needs of kvferry: a registry with injected plugins, and two workers in two processes."""

import types
from collections.abc import Iterable, Iterator

from kvferry.registry.discovery import Discovery, Entry, discover
from kvferry.registry.door import Registry
from kvferry.registry.load import register_all
from kvferry.registry.records import INJECTED, Origin
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Toggles
from kvferry_plugins.errors import PluginLoadError

__all__ = ["isolated_registry"]

_MODELS_PACKAGE = "kvferry_models_plugins"


def isolated_registry(*plugins: object, builtin: bool = True, builtin_models: bool = False) -> Registry:
    """Make a registry of these plugins, which rank as injected; nothing that is installed is discovered.

    Conflicts between plugins arise when something is resolved, not here.

    Args:
        plugins: modules or instances with hook implementations. A plugin is named by its attribute ``name``, a
            module by its own; those without a name are ``fake-1``, ``fake-2``, …
        builtin: whether kvferry's own backends, runtimes and managers are there.
        builtin_models: whether kvferry's own model plugins are there too.

    Raises:
        PluginLoadError: a plugin cannot be registered, or two have one name.
    """
    named = dict(_named(plugins))
    entries = [Entry(name, name, INJECTED, None, _label(plugin), Origin.INJECTED) for name, plugin in named.items()]
    entries += [each for each in _builtin(builtin, builtin_models) if each.name not in named]
    selection = survey(Discovery(tuple(sorted(entries, key=lambda entry: entry.name))), Toggles())
    registry = register_all(selection, named)
    for name in named:
        _require_active(registry, name)
    return registry


def _named(plugins: Iterable[object]) -> Iterator[tuple[str, object]]:
    unnamed = 0
    taken: set[str] = set()
    for plugin in plugins:
        name = _own_name(plugin)
        if name is None:
            unnamed += 1
            name = f"fake-{unnamed}"
        if name in taken:
            raise PluginLoadError(f"two injected plugins are named {name!r}; give one another name", plugin=name)
        taken.add(name)
        yield name, plugin


def _own_name(plugin: object) -> str | None:
    name = plugin.__name__ if isinstance(plugin, types.ModuleType) else getattr(plugin, "name", None)
    return name if isinstance(name, str) else None


def _label(plugin: object) -> str:
    return plugin.__name__ if isinstance(plugin, types.ModuleType) else repr(plugin)


def _builtin(builtin: bool, builtin_models: bool) -> list[Entry]:
    def is_wanted(entry: Entry) -> bool:
        is_model = entry.value.partition(".")[0] == _MODELS_PACKAGE
        return builtin_models if is_model else builtin

    if not (builtin or builtin_models):
        return []
    return [each for each in discover().entries if each.origin is Origin.BUILTIN and is_wanted(each)]


def _require_active(registry: Registry, name: str) -> None:
    record = registry.record(name)
    if record is not None and not record.is_active:
        raise PluginLoadError(f"injected plugin {record.describe()}", plugin=name, distribution=INJECTED)
