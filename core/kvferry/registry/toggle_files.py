"""Reads toggles from ``kvferry.toml``, the engine configuration, the environment and flags."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvferry.folders import xdg_folder
from kvferry.registry.names import nearest
from kvferry.registry.toggles import (
    CONFIGURATION,
    PROJECT,
    USER,
    Layer,
    Toggles,
    environment_layers,
    flag_layers,
)
from kvferry_plugins.errors import ConfigError

FILE_NAME = "kvferry.toml"
_LISTS = ("enable", "disable", "required")
_KEYS = (*_LISTS, "prefer")


def user_file(environ: Mapping[str, str]) -> Path:
    """Where the user's own toggles are: ``$XDG_CONFIG_HOME/kvferry/kvferry.toml``."""
    return xdg_folder(environ, "XDG_CONFIG_HOME", ".config") / FILE_NAME


def project_file(folder: Path, environ: Mapping[str, str]) -> Path | None:
    """The nearest ``kvferry.toml`` from the folder upwards that is not the user's own, or None."""
    own = user_file(environ)
    for each in (folder, *folder.parents):
        path = each / FILE_NAME
        if path != own and path.is_file():
            return path
    return None


def read_toggles(
    *,
    environ: Mapping[str, str],
    folder: Path,
    flags: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    config_name: str = "the engine configuration",
    strict: bool = False,
) -> Toggles:
    """Collect all layers, lowest first.

    Args:
        environ: the process's environment.
        folder: where the search for the project's file starts.
        flags: values of ``-p``, as written.
        config: the engine configuration's ``plugins`` section.
        config_name: the file that ``config`` is from.
        strict: whether any failing plugin is fatal.

    Raises:
        ConfigError: a file cannot be read, or holds something else than toggles.
    """
    files = {USER: user_file(environ), PROJECT: project_file(folder, environ)}
    layers = [
        parse_layer(read_toml(path).get("plugins", {}), str(path), kind)
        for kind, path in files.items()
        if path and path.is_file()
    ]
    if config:
        layers.append(parse_layer(config, f"{config_name} (plugins)", CONFIGURATION))
    return Toggles((*layers, *environment_layers(environ), *flag_layers(flags)), strict)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a ``kvferry.toml``. Raises ConfigError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}; mend or remove it") from error
    for key in document:
        if key != "plugins":
            raise ConfigError(f"{path}: unknown key {key!r}; toggles stand under [plugins]", setting=key)
    return document


def parse_layer(section: object, source: str, kind: str = "") -> Layer:
    """Check one ``plugins`` section and strip its names. Raises ConfigError."""
    if not isinstance(section, Mapping):
        raise ConfigError(f"{source}: plugins is {section!r}, and must be a section", setting="plugins")
    for key in section:
        if key not in _KEYS:
            raise ConfigError(
                f"{source}: unknown key plugins.{key}; {nearest(str(key), _KEYS)}", setting=f"plugins.{key}"
            )
    enable, disable, required = (_strip_names(section.get(key, ()), source, key) for key in _LISTS)
    both = sorted(set(enable) & set(disable))
    if both:
        message = f"{source}: {', '.join(both)} is both enabled and disabled; remove one"
        raise ConfigError(message, setting="plugins.disable")
    return Layer(source, enable, disable, required, _preferences(section.get("prefer", {}), source), kind=kind)


def _strip_names(value: object, source: str, key: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(each, str) for each in value):
        raise ConfigError(
            f"{source}: plugins.{key} is {value!r}, and must be a list of plugin names", setting=f"plugins.{key}"
        )
    names: list[str] = [each.strip() for each in value]
    return tuple(name for name in names if name)


def _preferences(value: object, source: str) -> Mapping[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in (*value, *value.values())):
        raise ConfigError(
            f"{source}: plugins.prefer is {value!r}, and must map an architecture or a backend to a plugin's name",
            setting="plugins.prefer",
        )
    return MappingProxyType({key.strip(): name.strip() for key, name in value.items()})
