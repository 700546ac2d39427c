"""What two workers compare before they trust each other with memory, and how bad each difference is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvferry.transceiver.wire import PROTOCOL
from kvferry_plugins.errors import HandshakeError
from kvferry_plugins.layout import KvLayout


class Severity(StrEnum):
    """How bad it is that a field differs."""

    FATAL = "fatal"
    WARNING = "warning"
    INFORMATION = "information"


SEVERITY: Mapping[str, Severity] = {
    "backend": Severity.FATAL,
    "dtype": Severity.FATAL,
    "model.config": Severity.FATAL,
    "model.weights": Severity.FATAL,
    "tokens_per_block": Severity.FATAL,
    "layers": Severity.FATAL,
    "kv_heads": Severity.FATAL,
    "head_dim": Severity.FATAL,
    "windows": Severity.FATAL,
    "block_image": Severity.FATAL,
    "checksum": Severity.FATAL,
    "libraries": Severity.WARNING,
    "plugins": Severity.WARNING,
    "runtime": Severity.INFORMATION,
    "model.architecture": Severity.INFORMATION,
}
"""Every field of a fingerprint. Protocol versions are ranges, and are compared by overlap instead."""

_ADVICE: Mapping[str, str] = {
    "tokens_per_block": "set kv_cache_config.tokens_per_block alike on both sides",
    "dtype": "set kv_cache_config.dtype alike on both sides",
    "backend": "set cache_transceiver_config.backend alike on both sides",
    "checksum": "set cache_transceiver_config.kv_transfer_checksum alike on both sides",
    "model.weights": "serve the same checkpoint on both sides",
    "model.config": "serve the same checkpoint on both sides",
    "protocol": "run the same kvferry on both sides",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs."""

    field: str
    ours: Any
    theirs: Any
    severity: Severity

    def __str__(self) -> str:
        return f"{self.field}: {self.ours!r} here, {self.theirs!r} there"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One worker's side of the handshake: plain values by field name."""

    fields: Mapping[str, Any] = field(default_factory=dict)


def make_fingerprint(
    *,
    backend: str,
    runtime: str,
    layout: KvLayout,
    model: Mapping[str, str],
    checksum: bool,
    libraries: Mapping[str, str],
    plugins: Mapping[str, str],
) -> Fingerprint:
    """Collect a worker's fields; geometry is the *derived* one, from the layout that was really built."""
    return Fingerprint(
        {
            "backend": backend,
            "runtime": runtime,
            "checksum": checksum,
            "libraries": dict(sorted(libraries.items())),
            "plugins": dict(sorted(plugins.items())),
            "model.architecture": model.get("architecture", ""),
            "model.config": model.get("config", ""),
            "model.weights": model.get("weights", ""),
            **geometry_of(layout),
        }
    )


def geometry_of(layout: KvLayout) -> dict[str, Any]:
    """The fields that a layout alone decides."""
    groups = layout.groups
    return {
        "dtype": layout.dtype,
        "layers": [list(group.layers) for group in groups],
        "tokens_per_block": [group.tokens_per_block for group in groups],
        "kv_heads": [group.kv_heads for group in groups],
        "head_dim": [group.head_dim for group in groups],
        "windows": [group.window for group in groups],
        # which bytes of a block are KV, in order: equal images can be copied block by block
        "block_image": [[list(run) for run in layout.pools[pool].runs] for group in groups for pool in group.pools],
    }


def compare(ours: Fingerprint, theirs: Mapping[str, Any]) -> list[Difference]:
    """List the fields that differ, fatal ones first; a field that one side lacks differs too."""
    found = [
        Difference(name, ours.fields.get(name), theirs.get(name), severity)
        for name, severity in SEVERITY.items()
        if ours.fields.get(name) != theirs.get(name)
    ]
    return sorted(found, key=lambda difference: list(Severity).index(difference.severity))


def compare_protocol(theirs: tuple[int, int]) -> Difference | None:
    """A fatal difference if the two version ranges do not overlap."""
    if theirs[0] <= PROTOCOL[1] and PROTOCOL[0] <= theirs[1]:
        return None
    return Difference("protocol", list(PROTOCOL), list(theirs), Severity.FATAL)


def refusal(differences: list[Difference], peer: str) -> HandshakeError | None:
    """Our own error for what is fatal among the differences, or None."""
    fatal = {d.field: (d.ours, d.theirs) for d in differences if d.severity is Severity.FATAL}
    if not fatal:
        return None
    return HandshakeError(f"{peer} cannot hand over KV to this worker: {_describe(fatal)}", fields=fatal)


def refused_by(peer: str, reason: str, fields: Mapping[str, tuple[Any, Any]]) -> HandshakeError:
    """The error for a peer's refusal; ``fields`` are (ours, theirs) as seen from here."""
    return HandshakeError(f"{peer} refused this worker: {_describe(fields) if fields else reason}", fields=dict(fields))


def _describe(fields: Mapping[str, tuple[Any, Any]]) -> str:
    """Both values of each field, as seen from here, and what to do."""
    listed = "; ".join(f"{name}: {ours!r} here, {theirs!r} there" for name, (ours, theirs) in fields.items())
    advice = next((_ADVICE[name] for name in fields if name in _ADVICE), "")
    return f"{listed} — {advice}" if advice else listed
