"""Registers one plugin wholly or not at all, after checking it against the hook specifications."""

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pluggy

from kvferry.registry.names import nearest
from kvferry_plugins import PROJECT_NAME, spec


class NotAPluginError(Exception):
    """The object that an entry point names cannot be registered; the message says what to change."""


@dataclass(frozen=True, slots=True)
class _Implementation:
    hook: str
    function: Callable[..., Any]
    options: dict[str, Any]


def new_manager() -> pluggy.PluginManager:
    """Make a manager that knows kvferry's hooks and no plugin."""
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(spec)
    return manager


def register(manager: pluggy.PluginManager, plugin: object, name: str) -> tuple[str, ...]:
    """Register a plugin under a name and return its hooks, sorted.

    Raises:
        NotAPluginError: it is no plugin, or does not fit the specifications; nothing was registered.
    """
    hooks = check_plugin(manager, plugin)
    try:
        manager.register(plugin, name=name)
    except BaseException as error:
        if manager.has_plugin(name):
            manager.unregister(name=name)
        if isinstance(error, ValueError):
            raise NotAPluginError(
                "is the same object as a plugin that is registered already; name it by one entry point"
            ) from error
        raise
    return hooks


def check_plugin(manager: pluggy.PluginManager, plugin: object) -> tuple[str, ...]:
    """Check a plugin against the specifications and return the hooks that it implements, sorted."""
    if inspect.isclass(plugin):
        raise NotAPluginError(
            f"is the class {plugin.__name__!r}, and an entry point must name a module or an instance; "
            f"make one, `plugin = {plugin.__name__}()`, and name that"
        )
    implementations = list(_implementations(manager, plugin))
    if not implementations:
        raise NotAPluginError(
            f"is {_describe(plugin)} without a hook implementation; "
            "mark functions with @hookimpl from kvferry_plugins, or name another object"
        )
    problems = [problem for each in implementations for problem in _problems(manager, each)]
    if problems:
        raise NotAPluginError("; ".join(problems))
    return tuple(
        sorted({each.hook for each in implementations if _specified_arguments(manager, each.hook) is not None})
    )


def _implementations(manager: pluggy.PluginManager, plugin: object) -> Iterator[_Implementation]:
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is not None:
            known: dict[str, Any] = dict(options)
            yield _Implementation(str(known.get("specname") or attribute), getattr(plugin, attribute), known)


def _problems(manager: pluggy.PluginManager, implementation: _Implementation) -> Iterator[str]:
    arguments = _specified_arguments(manager, implementation.hook)
    if arguments is None:
        if not implementation.options.get("optionalhook"):
            yield _unknown_hook(manager, implementation.hook)
        return
    if implementation.options.get("wrapper") or implementation.options.get("hookwrapper"):
        yield f"hook {implementation.hook!r} is a wrapper, and kvferry ranks answers instead of wrapping them"
    if inspect.iscoroutinefunction(implementation.function):
        yield f"hook {implementation.hook!r} is an async function, and hooks are called synchronously"
    for parameter in _parameters(implementation.function):
        if parameter.name not in arguments:
            yield _unknown_argument(implementation.hook, parameter.name, arguments)
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            yield f"hook {implementation.hook!r} takes {parameter.name!r} by position only, and arguments come by name"


def _specified_arguments(manager: pluggy.PluginManager, hook: str) -> tuple[str, ...] | None:
    caller = getattr(manager.hook, hook, None)
    return tuple(caller.spec.argnames) if caller is not None and caller.has_spec() else None


def taken_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """Name the arguments that an implementation takes, those with a default too."""
    return tuple(parameter.name for parameter in _parameters(function))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    # A private one with a default is the implementation's own, as in `_table=TABLE`.
    return [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and not (parameter.name.startswith("_") and parameter.default is not parameter.empty)
    ]


def _unknown_hook(manager: pluggy.PluginManager, hook: str) -> str:
    hooks = sorted(name for name in vars(manager.hook) if _specified_arguments(manager, name) is not None)
    return f"hook {hook!r} does not exist; {nearest(hook, hooks)}"


def _unknown_argument(hook: str, argument: str, known: Iterable[str]) -> str:
    names = tuple(known)
    if not names:
        return f"hook {hook!r} takes no argument, and this implementation takes {argument!r}"
    return f"hook {hook!r} has no argument {argument!r}; {nearest(argument, names)}"


def _describe(plugin: object) -> str:
    if isinstance(plugin, types.ModuleType):
        return f"the module {plugin.__name__!r}"
    return f"an object of type {type(plugin).__name__!r}"
