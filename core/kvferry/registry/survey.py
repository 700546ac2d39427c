"""The plugins as metadata and toggles tell them, without importing any."""

from importlib.util import find_spec

from kvferry.registry.discovery import Discovery
from kvferry.registry.selection import Selection, select
from kvferry.registry.toggles import Toggles


def survey(discovery: Discovery, toggles: Toggles) -> Selection:
    """Apply the toggles to what was discovered; problems are collected, nothing is raised."""
    return select(discovery.entries, toggles, is_importable=is_importable)


def is_importable(module: str) -> bool:
    """Tell whether a dotted module can be found; parents of a submodule are imported for it."""
    try:
        return find_spec(module) is not None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        # A parent that exists and breaks is for the import to report.
        return "." in module and is_importable(module.partition(".")[0])
