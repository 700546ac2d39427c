"""The contract: all that the author of a kvferry plugin imports.

A plugin is a module (or an instance) whose functions carry ``@hookimpl`` and whose distribution names it under the
entry-point group ``kvferry``. ``spec.py`` lists the questions, ``types.py`` the values that cross the border.
This package imports neither torch nor a transport, and nothing else of kvferry.
"""

from typing import Final

import pluggy

PROJECT_NAME: Final = "kvferry"
"""pluggy's project name and the entry-point group."""

API_VERSION: Final = 1
"""Grows when the contract changes in a way that a plugin can notice."""

hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
"""Marks a function of a plugin as the implementation of the hook that has its name."""

__all__ = ["API_VERSION", "PROJECT_NAME", "hookimpl"]
