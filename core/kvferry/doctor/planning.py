"""Resolves the configuration in a process of its own, since that imports plugins, and looks at the plan."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.doctor.deployment import Deployment
from kvferry.doctor.findings import Area, Finding, Severity
from kvferry.registry.inspection import Inspected
from kvferry.registry.isolation import Call, call_isolated
from kvferry.registry.toggles import Layer, Toggles
from kvferry_plugins.errors import KvferryError, PluginLoadError

if TYPE_CHECKING:
    from kvferry.config import EngineArgs

LEFT_OUT = "doctor, since its import takes its process along"


@dataclass(frozen=True, slots=True)
class Planned:
    """What the configuration leads to here."""

    plan: Mapping[str, Any] | None = None
    """As ``explain --json`` has it; None = there is none, and ``errors`` say why."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """``backend``, ``runtime``, ``manager`` → what it lacks here."""
    warnings: tuple[str, ...] = ()
    errors: tuple[Mapping[str, Any], ...] = ()
    failure: str | None = None
    """How the process ended instead of answering."""

    @property
    def runtime(self) -> str | None:
        """The effective one."""
        return self.plan["transceiver"]["runtime"] if self.plan else None

    @property
    def backend(self) -> str | None:
        """The effective one."""
        return self.plan["transceiver"]["backend"] if self.plan else None


def make_plan_aside(
    args: "EngineArgs", toggles: Toggles, inspected: Iterable[Inspected], *, model: Path | None, timeout: float
) -> Planned:
    """Resolve, without the plugins whose import crashes or hangs.

    Args:
        args: the configuration.
        toggles: every layer.
        inspected: the plugins, as they came out one by one.
        model: a checkpoint, or None.
        timeout: seconds that it may take.
    """
    crashed = tuple(one.record.name for one in inspected if one.crashed)
    layers = [*toggles.layers, *([Layer(LEFT_OUT, disable=crashed)] if crashed else [])]
    arguments = (args.written(), args.origin, [_plain(layer) for layer in layers], str(model) if model else None)
    (ending,) = call_isolated([Call(f"{__name__}:resolve_here", arguments)], timeout=timeout)
    if ending.failure is not None:
        return Planned(failure=ending.failure)
    value = ending.value
    return Planned(value["plan"], value["missing"], tuple(value["warnings"]), tuple(value["errors"]))


def resolve_here(
    written: Mapping[str, Any], origin: str | None, layers: Sequence[Mapping[str, Any]], model: str | None
) -> dict[str, Any]:
    """Resolve in this process, and describe the plan as JSON."""
    import os

    from kvferry.checkpoint import load_model_spec
    from kvferry.cli.explain import plain_plan
    from kvferry.cli.output import error_items
    from kvferry.config import parse_engine_args
    from kvferry.config.nested import thaw
    from kvferry.dispatcher import missing_libraries, resolve
    from kvferry.integrations.checkpoints import find_configuration
    from kvferry.registry.guard import Guard, limit_here
    from kvferry.registry.load import load_registry

    nothing: dict[str, Any] = {"plan": None, "missing": {}, "warnings": [], "errors": []}
    try:
        args = parse_engine_args(written, origin=origin)
        spec = load_model_spec(find_configuration(model)) if model else None
        toggled = Toggles(tuple(_layer(plain) for plain in layers))
        registry = load_registry(toggles=toggled, guard=Guard(limit_here(), tells_crashes=False))
        plan = resolve(args, model=spec, registry=registry, environ=os.environ)
        missing = missing_libraries(plan, registry)
    except KvferryError as error:
        return {**nothing, "errors": error_items(error)}
    names = ("architecture", "execution_architecture")
    described = plain_plan(plan, model={name: getattr(plan, name) for name in names}, missing=frozenset(missing))
    return {**nothing, "plan": thaw(described), "missing": missing, "warnings": list(plan.warnings)}


def deployment_of(args: "EngineArgs | None", planned: Planned | None) -> Deployment:
    """What is to run; without a plan all backends count."""
    if args is None:
        return Deployment()
    peers = tuple(peer.endpoint for peer in args.peers)
    if planned is None or planned.plan is None:
        return Deployment(peers=peers, device=args.device)
    plan = planned.plan
    source = next(each["source"] for each in plan["decisions"] if each["setting"].endswith(".backend"))
    return Deployment(plan["transceiver"]["backend"], source, peers, args.device)


def plan_findings(planned: Planned, known: Collection[str], broken: Collection[str]) -> Iterator[Finding]:
    """Say whether the plan can be built here.

    Args:
        planned: from ``make_plan_aside``.
        known: messages that other checks tell in their own words.
        broken: backends and runtimes whose probe failed.
    """
    if planned.failure is not None:
        what = f"could not be resolved: the process {planned.failure}"
        yield _finding(Severity.ERROR, "the plan", what, fix="kvferry --debug explain shows where it ends")
    for error in planned.errors:
        if error["message"] in known or error["type"] == PluginLoadError.__name__:
            continue  # a plugin that has to be active and is not: told with the plugins
        what, _, fix = str(error["message"]).partition("; ")
        yield _finding(Severity.ERROR, error["setting"] or "the plan", what, fix=fix)
    for warning in planned.warnings:
        if warning not in known:
            what, _, fix = warning.partition("; ")
            yield _finding(Severity.WARNING, "the plan", what, fix=fix)
    for lack in planned.missing.values():
        what, _, fix = lack.partition("; ")
        yield _finding(Severity.ERROR, "the plan", f"cannot be built here: {what}", fix=fix)
    if planned.plan is not None and not planned.missing:
        yield _verdict(planned, planned.plan, broken)


def _verdict(planned: Planned, plan: Mapping[str, Any], broken: Collection[str]) -> Finding:
    lacks = [name for name in (planned.backend, planned.runtime) if name in broken]
    if lacks:
        what = f"is {_summary(plan)}; {' and '.join(map(str, lacks))} does not work here, as said above"
        return _finding(Severity.INFO, "the plan", what)
    return _finding(Severity.OK, "the plan", f"can be built here: {_summary(plan)}")


def _summary(plan: Mapping[str, Any]) -> str:
    transceiver = plan["transceiver"]
    runs = f"{transceiver['runtime']} on {transceiver['backend']}" if transceiver["enabled"] else "no transceiver"
    return f"{runs}, manager {plan['kv_cache_manager']}"


def _plain(layer: Layer) -> dict[str, Any]:
    return {
        "source": layer.source,
        "enable": layer.enable,
        "disable": layer.disable,
        "required": layer.required,
        "prefer": dict(layer.prefer),
        "external_only": layer.external_only,
        "kind": layer.kind,
    }


def _layer(plain: Mapping[str, Any]) -> Layer:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}
    return Layer(**values)


def _finding(severity: Severity, subject: str, what: str, *, fix: str = "") -> Finding:
    return Finding(Area.CONFIGURATION, severity, subject, what, fix=fix)
