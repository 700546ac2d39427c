"""How many bytes an element of a KV cache takes: a table, so that a layout is planned without torch."""

from collections.abc import Mapping

from kvferry_plugins.errors import ConfigError

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("float64", "double", "int64"), 8),
    **dict.fromkeys(("float32", "float", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "half", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int8", "uint8"), 1),
}
"""torch's name of a dtype, without the module → bytes."""


def item_bytes(name: str) -> int:
    """Bytes of one element. Raises ConfigError: no KV cache is kept in that dtype."""
    try:
        return ITEM_BYTES[name]
    except KeyError:
        raise ConfigError(
            f"{name!r} is not a torch dtype that a KV cache is kept in; try float32 or bfloat16",
            setting="kv_cache_config.dtype",
        ) from None
