"""The environment variables that operators may set, and what each does."""

from collections.abc import Mapping
from typing import Final

VARIABLES: Final[Mapping[str, str]] = {
    "KVFERRY_PLUGINS": "of the external plugins only these are in, separated by commas; set and empty: none",
    "KVFERRY_DISABLE_PLUGINS": "these plugins are out, separated by commas",
    "KVFERRY_DISABLE_PLUGIN_AUTOLOAD": "``1``: no external plugin is in",
    "KVFERRY_PLUGIN_IMPORT_SECONDS": "how long a plugin's import may take, and a hook that is asked while resolving",
    "KVFERRY_LOCKED": "``1``: a worker starts only if its plugins are those of ``kvferry.lock``",
    "KVFERRY_CURVE_KEY_FILE": "another key file than ``$XDG_STATE_HOME/kvferry/curve.key``",
}
"""Ours, by name; the backend selectors are ``resolution.selectors.SELECTORS``."""
