"""Fields of a checkpoint's ``config.json``, read strictly."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry_plugins.errors import ConfigError

CONFIG_NAME = "config.json"


def optional(config: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of the fields that holds something; null counts as missing.

    Raises:
        ConfigError: it holds no positive integer.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name!r} in {CONFIG_NAME} should be an integer > 0, but is {value!r}", setting=name)
        return value
    return None


def positive(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of the fields that holds something, else the default. Raises ConfigError if there is none."""
    value = optional(config, *names)
    if value is not None:
        return value
    if default is None:
        raise ConfigError(
            f"{CONFIG_NAME} does not say {names[0]!r}, which the KV cache's shape needs; it says: "
            f"{', '.join(sorted(config)) or 'nothing'}",
            setting=names[0],
        )
    return default


def one_a_layer(values: object, name: str, layers: int) -> Sequence[object]:
    """Return a list that has an entry for each layer. Raises ConfigError."""
    if not isinstance(values, list | tuple) or len(values) != layers:
        count = len(values) if isinstance(values, list | tuple) else "no list"
        raise ConfigError(f"{name!r} in {CONFIG_NAME} should name {layers} layers, but holds {count}", setting=name)
    return values
