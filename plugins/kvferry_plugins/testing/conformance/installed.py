"""Finds kvferry itself, which the contract never imports: where it is installed, a plugin meets the real thing."""

from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType

from kvferry_plugins import PROJECT_NAME


def core_module(name: str) -> ModuleType | None:
    """A module of kvferry's core, ``kvferry.dispatcher``; None where only the contract is installed."""
    try:
        return import_module(name) if find_spec("kvferry") is not None else None
    except ValueError:  # sys.modules says that there is none
        return None


def entry_points_at(module: str) -> list[metadata.EntryPoint]:
    """Entry points of kvferry's group that lead into a module, sorted by name."""
    points = metadata.entry_points(group=PROJECT_NAME)
    return sorted((each for each in points if each.module == module), key=lambda each: each.name)


def entry_points_named(name: str) -> list[metadata.EntryPoint]:
    """Entry points of kvferry's group that have a name."""
    return list(metadata.entry_points(group=PROJECT_NAME, name=name))
