"""Asks one plugin's hooks as kvferry does: by name, with arguments that cannot be changed."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pluggy

from kvferry_plugins import PROJECT_NAME, spec

MODEL_HOOKS = ("preferred_transceiver_runtime", "model_defaults")

Ask = Callable[[Mapping[str, Any]], Any]
"""Calls a hook with those of the arguments that it takes."""


def hooks_of(plugin: object) -> dict[str, Ask]:
    """Hook → how to ask it, of every hook that the plugin implements."""
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(spec)
    found: dict[str, Ask] = {}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is not None:
            found[str(options.get("specname") or attribute)] = _ask(getattr(plugin, attribute))
    return found


def specified() -> dict[str, tuple[str, ...]]:
    """Hook → its arguments, of every hook that kvferry has."""
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(spec)
    callers = (each for each in vars(manager.hook).values() if isinstance(each, pluggy.HookCaller))
    return {caller.name: tuple(caller.spec.argnames) for caller in callers if caller.spec is not None}


def frozen(value: Any) -> Any:
    """Copy plain data with read-only mappings and tuples, as hooks are handed it."""
    if isinstance(value, Mapping):
        return MappingProxyType({key: frozen(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    return value


def thawed(value: Any) -> Any:
    """Copy plain data with dictionaries and lists."""
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [thawed(item) for item in value]
    return value


def questions(architecture: str, config: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield arguments for the hooks about a model: with its ``config.json``, with one that says little, with none."""
    configs: list[Mapping[str, Any] | None] = [None, {}, {"architectures": [architecture]}]
    if config is not None:
        configs.append(config)
    for each in configs:
        for engine_args in (None, {}, {"cache_transceiver_config": {"backend": "NIXL"}}):
            yield {"architecture": architecture, "pretrained_config": each, "engine_args": engine_args}


def _ask(function: Callable[..., Any]) -> Ask:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes = [each for each in inspect.signature(function).parameters.values() if each.kind not in kinds]

    def ask(arguments: Mapping[str, Any]) -> Any:
        given = {each.name: arguments[each.name] for each in takes if each.name in arguments}
        return function(**given)

    return ask
