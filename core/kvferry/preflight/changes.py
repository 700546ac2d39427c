"""Which side to change so that a field is alike, and the line to write there."""

from collections.abc import Callable, Mapping
from typing import Any

from kvferry.preflight.sides import Side
from kvferry.preflight.verdicts import Change

TRANSCEIVER, CACHE = "cache_transceiver_config", "kv_cache_config"
_SECTIONS: Mapping[str, tuple[str, str]] = {
    "checksum": (TRANSCEIVER, "kv_transfer_checksum"),
    "kv_transfer_timeout_ms": (TRANSCEIVER, "kv_transfer_timeout_ms"),
    "kv_transfer_admission_timeout_ms": (TRANSCEIVER, "kv_transfer_admission_timeout_ms"),
    "enable_pipelined_transfer": (TRANSCEIVER, "enable_pipelined_transfer"),
    "tokens_per_block": (CACHE, "tokens_per_block"),
}
"""Field → section and key, of those that are mended by writing the other side's value."""

_OF_THE_MODEL = frozenset(
    {"model.architecture", "model.config", "model.weights", "layers", "kinds", "roles", "kv_heads"}
)


def changes_of(field: str, context: Side, generation: Side) -> tuple[Change, ...]:
    """Ways to mend a field, each of which is enough; a side that does not run yet comes first."""
    pairs = ((generation, context), (context, generation))
    ways = [(side, _line(field, side, other)) for side, other in sorted(pairs, key=lambda pair: pair[0].running)]
    return tuple(change(side, line) for side, line in ways if line)


def change(side: Side, line: str) -> Change:
    """A change of one side; one that runs has to be started again for it."""
    return Change(side.role, side.source, f"{line}, and start it again" if side.running else line)


def setting(section: str, key: str, value: object) -> str:
    """One setting as a line of YAML: ``kv_cache_config: {tokens_per_block: 32}``."""
    return f"{section}: {{{key}: {_written(value)}}}"


def _line(field: str, side: Side, other: Side) -> str | None:
    """What to write at ``side`` so that it goes with ``other``; None where nothing would help there."""
    if field in _SECTIONS:
        section, key = _SECTIONS[field]
        values = other.settings.transceiver if section == TRANSCEIVER else other.settings.cache
        return setting(section, key, values[key]) if values is not None and key in values else None
    if field == "roles" and side.fact("dtype") != other.fact("dtype"):  # the rows' bytes are the dtype's
        return _dtype(side, other)
    if field in _OF_THE_MODEL:
        return f"serve {other.model}" if other.model else None
    make = _LINES.get(field)
    return make(side, other) if make else None


def _backend(side: Side, other: Side) -> str | None:
    backend = other.fact("backend").value
    return setting(TRANSCEIVER, "backend", backend) if backend else None


def _dtype(side: Side, other: Side) -> str | None:
    dtype = other.fact("dtype")
    return setting(CACHE, "dtype", dtype.value) if dtype.known else None


def _windows(side: Side, other: Side) -> str | None:
    """A manager that slides is what a window needs of the generation side, and must not be the context side's alone."""
    if side.settings.manager != other.settings.manager:
        return setting(CACHE, "use_kv_cache_manager_v2", side.role.value == "generation")
    return setting(CACHE, "max_attention_window", other.settings.cache.get("max_attention_window"))


def _plugins(side: Side, other: Side) -> str | None:
    mine, theirs = side.fact("plugins").value or {}, other.fact("plugins").value or {}
    extra = sorted(mine.keys() - theirs.keys())
    wanted = {name: theirs[name] for name in sorted(theirs) if mine.get(name) != theirs[name]}
    lines = [f"plugins: {{disable: [{', '.join(extra)}]}}"] if extra else []
    if wanted and not (side.running or other.running):  # one installation, so it is only turned off
        lines.append(f"plugins: {{enable: [{', '.join(wanted)}]}}, in the place of what disables it")
    elif wanted:
        lines.append(f"install {', '.join(dict.fromkeys(wanted.values()))}")
    return " and ".join(lines) or None


def _libraries(side: Side, other: Side) -> str | None:
    mine, theirs = side.fact("libraries").value or {}, other.fact("libraries").value or {}
    wanted = [f"{name} {theirs[name]}" for name in sorted(theirs) if mine.get(name) != theirs[name]]
    return f"install {', '.join(wanted)}" if wanted else None


def _protocol(side: Side, other: Side) -> str | None:
    return "install the kvferry that the other side runs"


_LINES: Mapping[str, Callable[[Side, Side], str | None]] = {
    "backend": _backend,
    "dtype": _dtype,
    "windows": _windows,
    "plugins": _plugins,
    "libraries": _libraries,
    "protocol": _protocol,
}


def _written(value: Any) -> str:
    """Write a value as YAML would, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    return str(value)
