"""Writes one plugin into, or out of, a ``kvferry.toml``, keeping the rest of the file as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomlkit

from kvferry.registry.toggle_files import parse_layer, read_toml
from kvferry.whole_files import replace_file
from kvferry_plugins.errors import ConfigError


def set_toggle(path: Path, name: str, *, enabled: bool | None, is_meant: Callable[[str], bool]) -> None:
    """Disable a plugin (False), enable it by name (True), or only stop disabling it (None).

    Args:
        path: the file; made if it does not exist.
        name: how the plugin, or the distribution whose plugins are meant, is written.
        enabled: what the file says afterwards.
        is_meant: whether a name that stands in the file means nothing else; it is taken out.

    Raises:
        ConfigError: the file holds something else than toggles, or cannot be written.
    """
    before = ""
    if path.is_file():
        parse_layer(read_toml(path).get("plugins", {}), str(path))
        before = path.read_bytes().decode()  # with the ends of lines that it has
    document = tomlkit.parse(before)
    section: Any = document.setdefault("plugins", tomlkit.table())
    written = "enable" if enabled else "disable"
    for key in ("enable", "disable"):
        # What stands there already in the same words stays, with its comment.
        kept = name if enabled is not None and key == written else None
        _remove(section, key, is_meant, kept)
    if enabled is not None and name not in [str(each).strip() for each in section.get(written, ())]:
        _add(section, written, name)
    after = tomlkit.dumps(document).rstrip("\n") + "\n"
    if after != before:
        _write(path, after)


def _remove(section: Any, key: str, is_meant: Callable[[str], bool], kept: str | None) -> None:
    names = section.get(key, [])
    for index in reversed(range(len(names))):
        name = str(names[index]).strip()
        if name != kept and is_meant(name):
            del names[index]
    if key in section and not names:
        del section[key]


def _add(section: Any, key: str, name: str) -> None:
    if key not in section:
        section[key] = tomlkit.array()
    section[key].append(name)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; choose --user or --project") from error
