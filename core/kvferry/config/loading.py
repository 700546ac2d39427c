"""From a YAML file, or a mapping, to ``EngineArgs``: every mistake at once, each with its place."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvferry.config.nested import thaw
from kvferry.config.problems import config_errors, one_or_all, require_text_keys
from kvferry.config.schema import EngineArgs
from kvferry_plugins.errors import ConfigError


def parse_engine_args(values: Mapping[str, Any], *, origin: str | None = None) -> EngineArgs:
    """Validate what was written; ``origin`` is the file to name in errors and decisions.

    Raises:
        ConfigError: one mistake, or a ResolutionError that holds all of them.
    """
    try:
        require_text_keys(values, origin)
        args = EngineArgs.model_validate(thaw(values))
    except ValidationError as error:
        raise one_or_all(config_errors(error, origin=origin)) from error
    except RecursionError as error:
        raise ConfigError(f"{origin or 'the configuration'} holds itself (an anchor within its own value)") from error
    args._origin = origin
    return args


def load_engine_args(path: str | os.PathLike[str]) -> EngineArgs:
    """Read the engine configuration from a YAML file; an empty file is an empty configuration.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or breaks the schema.
    """
    document = read_yaml(path)
    if document is None:
        return parse_engine_args({}, origin=os.fspath(path))
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"{os.fspath(path)}: an engine configuration is a mapping of keys to values, "
            f"but this file holds {type(document).__name__}; see docs/reference/configuration.md for its keys"
        )
    return parse_engine_args(document, origin=os.fspath(path))


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Return a YAML file's document; a key written twice is an error, since one of the two would be lost.

    Raises:
        ConfigError: the file cannot be read, or is no YAML.
    """
    import yaml

    text = _read_text(Path(path))
    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, RecursionError) as error:
        problem = " ".join(str(error).replace('"<unicode string>"', os.fspath(path)).split())
        raise ConfigError(f"{os.fspath(path)} is no valid YAML: {problem}") from error
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{os.fspath(path)} holds a value that YAML cannot read: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read the configuration {os.fspath(path)}: {reason}") from error


def _loader() -> Any:
    """Make a safe loader that refuses a key written twice."""
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key_node, _ in node.value:
                key = str(key_node.value)
                if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is written twice", key_node.start_mark
                    )
                seen.add(key)
            return super().construct_mapping(node, deep)

    return UniqueKeyLoader
