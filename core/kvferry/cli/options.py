"""The options that decide about plugins, the same for every verb, and the registry that they lead to."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.folders import working_folder

if TYPE_CHECKING:
    from kvferry.registry.door import Registry
    from kvferry.registry.toggles import Toggles


def plugin_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config``, ``-p`` and ``--strict-plugins``, which arrive as ``config`` (a path) and ``toggles``.

    ``toggles`` holds every layer: files, the configuration's ``plugins`` section, the environment and the flags.
    """

    @click.option("--config", type=click.Path(path_type=Path), help="The engine configuration, a YAML file.")
    @click.option(
        "-p",
        "--plugin",
        "flags",
        multiple=True,
        metavar="NAME",
        help="Use a plugin, installed or a module (module:NAME); no:NAME leaves one out. Repeatable.",
    )
    @click.option("--strict-plugins", is_flag=True, help="Any plugin that fails is fatal.")
    @functools.wraps(function)
    def with_toggles(
        *args: Any, config: Path | None, flags: tuple[str, ...], strict_plugins: bool, **kwargs: Any
    ) -> Any:
        toggles = make_toggles(config, flags, strict=strict_plugins)
        return function(*args, config=config, toggles=toggles, **kwargs)

    return with_toggles


def make_toggles(config: Path | None, flags: tuple[str, ...] = (), *, strict: bool = False) -> "Toggles":
    """Collect every layer of toggles for this process. Raises ConfigError."""
    from kvferry.registry.toggle_files import read_toggles

    return read_toggles(
        environ=os.environ,
        folder=working_folder(),
        flags=flags,
        config=_plugins_section(config) if config else None,
        config_name=str(config),
        strict=strict,
    )


def open_registry(toggles: "Toggles", lock: Path | None = None) -> "Registry":
    """Load the plugins and remember how they came out, for ``plugins list``.

    Args:
        toggles: every layer.
        lock: the lock that the plugins must equal, before any is imported and after; None = none.

    Raises:
        ConfigError: a toggle or the lock is wrong.
        PluginLoadError: a plugin is not as it has to be.
    """
    from kvferry.registry.guard import Guard, limit_seconds
    from kvferry.registry.load import load_registry
    from kvferry.registry.locking import require_loaded, require_locked
    from kvferry.registry.state_file import record_states, state_file

    locked = require_locked(lock, toggles) if lock is not None else None
    registry = load_registry(toggles=toggles, guard=Guard(limit_seconds(os.environ)))
    record_states(state_file(os.environ), registry.records())
    if lock is not None and locked is not None:
        require_loaded(lock, locked, registry)
    return registry


def _plugins_section(config: Path) -> dict[str, Any]:
    from kvferry.config.loading import load_engine_args

    return load_engine_args(config).plugins.model_dump(exclude_unset=True)
