"""What two workers compare before they trust each other with memory, and how bad each difference is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvferry.transceiver.mapping import blocks_fit, window_serves
from kvferry.transceiver.wire import PROTOCOL
from kvferry_plugins.errors import HandshakeError
from kvferry_plugins.layout import KvLayout, LayerGroup
from kvferry_plugins.types import Role

PER_LAYER = ("kinds", "roles", "kv_heads", "windows", "tokens_per_block")
"""Fields that are [first layer, last layer, value] each."""

GEOMETRY = ("dtype", "layers", *PER_LAYER)

PLUGIN_FIELDS = ("plugins", "plugins.digest")
"""Fields that are a value a plugin: who differs in one is told of those plugins alone."""

MAX_LAYERS = 4096
"""Of one run in a peer's fingerprint that are looked at."""


class Severity(StrEnum):
    """How bad it is that a field differs."""

    FATAL = "fatal"
    WARNING = "warning"
    INFORMATION = "information"


SEVERITY: Mapping[str, Severity] = {
    "backend": Severity.FATAL,
    "model.config": Severity.FATAL,
    "model.weights": Severity.FATAL,
    **dict.fromkeys(GEOMETRY, Severity.FATAL),
    "checksum": Severity.FATAL,
    "libraries": Severity.WARNING,
    **dict.fromkeys(PLUGIN_FIELDS, Severity.WARNING),  # fatal for a worker that is locked
    "runtime": Severity.INFORMATION,
    "model.architecture": Severity.INFORMATION,
}
"""Every field of a fingerprint. Protocol versions are ranges, and are compared by overlap instead."""

ADVICE: Mapping[str, str] = {
    "tokens_per_block": "set kv_cache_config.tokens_per_block so that one side's divides the other's",
    "windows": "set kv_cache_config.use_kv_cache_manager_v2 to false on the context worker, which then keeps every "
    "token, or to true on both",
    "dtype": "set kv_cache_config.dtype alike on both sides",
    "backend": "set cache_transceiver_config.backend alike on both sides",
    "checksum": "set cache_transceiver_config.kv_transfer_checksum alike on both sides",
    "model.weights": "serve the same checkpoint on both sides",
    "model.config": "serve the same checkpoint on both sides",
    "protocol": "run the same kvferry on both sides",
    "plugins": "install and turn on the same plugins on both sides, or start without --locked",
    "plugins.digest": "install that plugin from one and the same wheel on both sides, or start without --locked",
}
"""What to do about a field that differs; ``kvferry preflight`` says the same."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs."""

    field: str
    ours: Any
    theirs: Any
    severity: Severity

    def __str__(self) -> str:
        return both_values(self.field, self.ours, self.theirs)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One worker's side of the handshake: plain values by field name."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    locked: bool = False
    """Whether this worker refuses a peer whose plugins differ."""


def make_fingerprint(
    *,
    backend: str,
    runtime: str,
    layout: KvLayout,
    model: Mapping[str, str],
    checksum: bool,
    libraries: Mapping[str, str],
    plugins: Mapping[str, str],
    plugin_digests: Mapping[str, str] | None = None,
    locked: bool = False,
    is_stage: bool = False,
) -> Fingerprint:
    """Collect a worker's fields; geometry is the *derived* one, from the layout that was really built.

    ``is_stage``: the layout holds one pipeline stage's layers, so that those of the two sides need not be the same.
    """
    return Fingerprint(
        {
            "backend": backend,
            "runtime": runtime,
            "checksum": checksum,
            "libraries": dict(sorted(libraries.items())),
            "plugins": dict(sorted(plugins.items())),
            "plugins.digest": dict(sorted((plugin_digests or {}).items())),
            "model.architecture": model.get("architecture", ""),
            "model.config": model.get("config", ""),
            "model.weights": model.get("weights", ""),
            **geometry_of(layout),
            "layers": "a stage's" if is_stage else [run[:2] for run in _runs(dict.fromkeys(_layers(layout)))],
        },
        locked,
    )


def geometry_of(layout: KvLayout) -> dict[str, Any]:
    """The fields that one rank's layout alone decides, whichever its part: layer by layer, what the whole model has."""
    by_layer = {layer: (group, _roles(layout, index, layer)) for index, group, layer in _grouped(layout)}
    values: dict[str, dict[int, Any]] = {
        "kinds": {layer: group.kind for layer, (group, _) in by_layer.items()},
        "roles": {layer: roles for layer, (_, roles) in by_layer.items()},
        "kv_heads": {layer: group.total_heads or group.kv_heads for layer, (group, _) in by_layer.items()},
        "windows": {layer: group.window for layer, (group, _) in by_layer.items()},
        "tokens_per_block": {  # of a state it does not matter; a stage may have nothing else
            layer: group.tokens_per_block if group.kind != "state" else None for layer, (group, _) in by_layer.items()
        },
    }
    return {"dtype": layout.dtype, **{name: _runs(of_layers) for name, of_layers in values.items()}}


def _grouped(layout: KvLayout) -> Iterator[tuple[int, LayerGroup, int]]:
    return ((index, group, layer) for index, group in enumerate(layout.groups) for layer in group.layers)


def _layers(layout: KvLayout) -> list[int]:
    return sorted(layer for _, _, layer in _grouped(layout))


def _roles(layout: KvLayout, index: int, layer: int) -> str:
    """What a layer keeps, and the bytes of one head's row: ``key 128, value 128``."""
    pools = (layout.pools[pool] for pool in layout.groups[index].pools)
    views = (view for pool in pools for view in pool.views if view.layer == layer)
    return ", ".join(sorted(f"{view.role} {view.row_bytes}" for view in views))


def _runs(of_layers: Mapping[int, Any]) -> list[list[Any]]:
    """[first layer, last layer, value] of consecutive layers that are alike."""
    runs: list[list[Any]] = []
    for layer, value in sorted(of_layers.items()):
        if runs and runs[-1][1] == layer - 1 and runs[-1][2] == value:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer, value])
    return runs


def _of_layers(runs: object) -> dict[int, Any]:
    """Undo ``_runs``, of whatever a peer sends."""
    found: dict[int, Any] = {}
    for run in runs if isinstance(runs, list) else ():
        if isinstance(run, list) and len(run) == 3 and all(isinstance(end, int) for end in run[:2]):
            found.update(dict.fromkeys(range(run[0], min(run[1] + 1, run[0] + MAX_LAYERS)), run[2]))
    return found


def compare(ours: Fingerprint, theirs: Mapping[str, Any], role: Role = Role.CONTEXT) -> list[Difference]:
    """List the fields that differ, fatal ones first; a field that one side lacks differs too.

    Args:
        ours: of this worker.
        theirs: the peer's fields.
        role: this worker's. Geometry is compared in the direction in which the bytes go, over the layers that both
            have: where a model is cut, each rank has its part.
    """
    found = []
    for name, severity in SEVERITY.items():
        pair = ours.fields.get(name), theirs.get(name)
        if pair[0] == pair[1] or (name == "layers" and "a stage's" in pair):
            continue
        differing: tuple[Any, Any] | None = pair
        if name in PER_LAYER:
            differing = _differing(name, ours.fields, theirs, role)
        elif name in PLUGIN_FIELDS:
            differing = _differing_plugins(name, ours.fields, theirs)
            severity = Severity.FATAL if ours.locked else severity
        if differing is not None:
            found.append(Difference(name, *differing, severity))
    return sorted(found, key=lambda difference: list(Severity).index(difference.severity))


def _differing(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], role: Role) -> tuple[Any, Any] | None:
    """Both sides' values of the layers that do not go together, or None."""
    here, there = _of_layers(ours.get(name)), _of_layers(theirs.get(name))
    if not here or not there:
        return (ours.get(name) if here else None), (theirs.get(name) if there else None)
    source, destination = (here, there) if role is Role.CONTEXT else (there, here)
    wrong = [
        layer for layer in sorted(here.keys() & there.keys()) if not _goes(name, source[layer], destination[layer])
    ]
    return (_said(here, wrong), _said(there, wrong)) if wrong else None


def _differing_plugins(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Both sides' values of the plugins that differ; of other files only where distribution and version are alike."""
    here, there = ours.get(name), theirs.get(name)
    if not isinstance(here, Mapping) or not isinstance(there, Mapping):
        return here, there
    names = here.keys() | there.keys()
    if name == "plugins.digest":
        names &= _alike(ours.get("plugins"), theirs.get("plugins"))
    wrong = sorted((each for each in names if here.get(each) != there.get(each)), key=str)
    if not wrong:
        return None
    return {each: here[each] for each in wrong if each in here}, {each: there[each] for each in wrong if each in there}


def _alike(here: Any, there: Any) -> set[Any]:
    if not isinstance(here, Mapping) or not isinstance(there, Mapping):
        return set()
    return {name for name in here if name in there and here[name] == there[name]}


def _goes(name: str, source: Any, destination: Any) -> bool:
    """Whether a layer that has the one value at its source may have the other at its destination."""
    if source == destination:
        return True
    if not all(value is None or (isinstance(value, int) and value > 0) for value in (source, destination)):
        return False
    if name == "windows":
        return window_serves(source, destination)
    return name == "tokens_per_block" and None not in (source, destination) and blocks_fit(source, destination)


def _said(of_layers: Mapping[int, Any], wrong: list[int]) -> Any:
    """One value if it is one; else by layers."""
    values = {layer: of_layers[layer] for layer in wrong}
    first = values[wrong[0]]
    return first if all(value == first for value in values.values()) else _runs(values)


def compare_protocol(theirs: tuple[int, int], ours: tuple[int, int] = PROTOCOL) -> Difference | None:
    """A fatal difference if the two version ranges do not overlap."""
    if theirs[0] <= ours[1] and ours[0] <= theirs[1]:
        return None
    return Difference("protocol", list(ours), list(theirs), Severity.FATAL)


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
    listed = "; ".join(both_values(name, ours, theirs) for name, (ours, theirs) in fields.items())
    advice = next((ADVICE[name] for name in fields if name in ADVICE), "")
    return f"{listed} — {advice}" if advice else listed


def both_values(name: str, ours: Any, theirs: Any, *, here: str = "here") -> str:
    """Write a field's values beside each other."""
    same_versions = name == "plugins.digest" and isinstance(ours, Mapping) and isinstance(theirs, Mapping)
    note = " (the same versions, but other files)" if same_versions else ""
    return f"{name}: {ours!r} {here}, {theirs!r} there{note}"
