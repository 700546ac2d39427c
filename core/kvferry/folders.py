"""Where kvferry keeps a user's files."""

from collections.abc import Mapping
from pathlib import Path

from kvferry_plugins.errors import ConfigError


def xdg_folder(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """kvferry's folder under an XDG base folder; a relative base is ignored, as the XDG specification says.

    Args:
        environ: the process's environment.
        variable: ``XDG_CONFIG_HOME``, ``XDG_STATE_HOME`` or ``XDG_CACHE_HOME``.
        default: the base without it, under the home folder.
    """
    base = Path(environ.get(variable, ""))
    home = Path(environ.get("HOME", "")) if environ.get("HOME") else Path.home()
    return (base if base.is_absolute() else home / default) / "kvferry"


def working_folder() -> Path:
    """The folder that a command runs in. Raises ConfigError: it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise ConfigError("the working folder is not there any more; run the command in one that is") from error
