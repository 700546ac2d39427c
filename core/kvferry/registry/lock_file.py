"""``kvferry.lock``: which plugins a deployment consists of, written and read."""

import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.registry.plugin_set import KnownPlugin, digest_of
from kvferry.registry.toggle_files import project_file
from kvferry.whole_files import replace_file
from kvferry_plugins.errors import ConfigError

FILE_NAME = "kvferry.lock"
VERSION = 1
_REWRITE = "write it again with `kvferry plugins lock`, where the plugins are the right ones"
_HEADER = "# Written by `kvferry plugins lock`, for `kvferry plugins verify` and `kvferry worker --locked`.\n"


@dataclass(frozen=True, slots=True)
class Lock:
    """What a lock file says."""

    plugins: tuple[KnownPlugin, ...]
    """Sorted by name."""

    @property
    def digest(self) -> str:
        """Of the whole, whatever the file's spacing and comments."""
        return digest_of([asdict(plugin) for plugin in self.plugins])


def lock_path(folder: Path, environ: Mapping[str, str]) -> Path:
    """Where the lock is: beside the project's ``kvferry.toml``, else in the folder."""
    project = project_file(folder, environ)
    return (project.parent if project else folder) / FILE_NAME


def make_lock(plugins: Iterable[KnownPlugin]) -> Lock:
    """Put plugins in the order of a lock."""
    return Lock(tuple(sorted(plugins, key=lambda plugin: plugin.name)))


def render_lock(lock: Lock) -> str:
    """Write a lock as TOML; the same plugins are the same text."""
    tables = "".join(f"\n[[plugin]]\n{_lines(plugin)}" for plugin in lock.plugins)
    return f'{_HEADER}version = {VERSION}\ndigest = "{lock.digest}"\n{tables}'


def write_lock(path: Path, lock: Lock) -> bool:
    """Write the file, wholly or not at all; False = it said so already. Raises ConfigError."""
    text = render_lock(lock).encode()
    try:
        if path.is_file() and path.read_bytes() == text:
            return False
        if path.exists() and not path.is_file():  # such as /dev/stdout: not to be replaced by a file
            path.write_bytes(text)
            return True
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; name another with --output") from error
    return True


def read_lock(path: Path) -> Lock:
    """Read a lock and check that nobody has edited it.

    Raises:
        ConfigError: there is none, it is cut, edited, of another version, or no lock at all.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no lock {path}; write one with `kvferry plugins lock`, or name another") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}; {_REWRITE}") from error
    _require_version(document, path)
    lock = Lock(_plugins(document, path))
    if document.get("digest") != lock.digest:
        raise ConfigError(
            f"{path} was edited or cut: its digest is {_short(document.get('digest'))}, and of what it says "
            f"{_short(lock.digest)}; {_REWRITE}",
            setting="digest",
        )
    return lock


def _require_version(document: Mapping[str, Any], path: Path) -> None:
    version = document.get("version")
    if version is None:
        raise ConfigError(f"{path} is no lock of kvferry's: it has no version; {_REWRITE}", setting="version")
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(
            f"{path} is a lock of version {_short(version)}, and this kvferry reads version {VERSION}; use the kvferry "
            f"that wrote it, or {_REWRITE}",
            setting="version",
        )


def _plugins(document: Mapping[str, Any], path: Path) -> tuple[KnownPlugin, ...]:
    unknown = sorted(document.keys() - {"version", "digest", "plugin"})
    if unknown:
        raise ConfigError(f"{path} has an unknown key {_short(unknown[0])}; {_REWRITE}", setting=unknown[0])
    tables = document.get("plugin", [])
    if not isinstance(tables, list):
        raise ConfigError(f"{path}: plugin must be a list of tables, [[plugin]]; {_REWRITE}", setting="plugin")
    plugins = [_plugin(table, number, path) for number, table in enumerate(tables, 1)]
    twice = sorted(name for name, number in Counter(plugin.name for plugin in plugins).items() if number > 1)
    if twice:
        raise ConfigError(f"{path} names the plugin {_short(twice[0])} more than once; {_REWRITE}", setting="plugin")
    return tuple(plugins)


def _plugin(table: object, number: int, path: Path) -> KnownPlugin:
    expected = {name: bool if name == "editable" else str for name in KnownPlugin.__slots__}
    given: Mapping[str, object] = table if isinstance(table, Mapping) else {}
    wrong = [name for name, kind in expected.items() if name != "editable" and not isinstance(given.get(name), kind)]
    wrong += [name for name in given if name not in expected or not isinstance(given[name], expected[name])]
    if wrong:
        raise ConfigError(
            f"{path}: entry {number} of [[plugin]] has {_short(wrong[0])} wrong or lacking; {_REWRITE}",
            setting=f"plugin.{wrong[0]}",
        )
    return KnownPlugin(**given)  # type: ignore[arg-type]


def _lines(plugin: KnownPlugin) -> str:
    import tomlkit

    values = {name: value for name, value in asdict(plugin).items() if name != "editable" or value}
    return tomlkit.dumps(values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"
