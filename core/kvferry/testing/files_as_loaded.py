"""Imported by the process that ranks are forked from: reads our files once, which all of them run."""

from kvferry.registry.discovery import discover
from kvferry.registry.plugin_set import files_as_loaded

for _distribution in discover().distributions.values():
    files_as_loaded(_distribution)
