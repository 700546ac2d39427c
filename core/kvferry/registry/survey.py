"""The plugins as metadata and toggles tell them, without importing any."""

from importlib.util import find_spec

from kvferry.registry.discovery import Discovery
from kvferry.registry.selection import Selection, select
from kvferry.registry.toggles import Toggles


def survey(discovery: Discovery, toggles: Toggles) -> Selection:
    """Apply the toggles to what was discovered; problems are collected, nothing is raised."""
    return select(discovery.entries, toggles, is_importable=is_importable)


def is_importable(module: str) -> bool:
    """Tell whether a dotted module can be found; parents of a submodule are imported for it.

    A parent that exists and breaks counts as found: the import will report how it breaks.
    """
    if module.startswith("."):
        return False
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError as error:
        return not f"{module}.".startswith(f"{error.name}.")
    except ValueError:
        return False
    except (Exception, SystemExit):
        return True
