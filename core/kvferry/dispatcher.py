"""Joins everything: ``resolve`` decides what a deployment gets, ``build`` makes it."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.checkpoint import ModelSpec, load_model_spec
from kvferry.config import EngineArgs, parse_engine_args
from kvferry.forks import Guarded, guard, released, require_no_parent
from kvferry.registry.answers import Answer
from kvferry.registry.availability import missing_modules
from kvferry.registry.door import Registry
from kvferry.registry.inheritance import Inheritance, inheritance_of
from kvferry.registry.plugin_set import plugin_digests
from kvferry.resolution.plan import make_plan
from kvferry.resolution.vocabulary import RUNTIME
from kvferry.topology import local_geometry
from kvferry.transceiver.memory_in_use import shut_down_manager
from kvferry_plugins.errors import BackendUnavailableError, ConfigError
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.transceiver import KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import (
    AgentSpec,
    ManagerKind,
    ManagerSpec,
    ModelGeometry,
    Peer,
    Plan,
    RankSpec,
    Role,
    ScheduleStyle,
    Topology,
    TransceiverRuntime,
    TransceiverSpec,
    TransferEvent,
)

log = logging.getLogger("kvferry")


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What ``build`` made, and the plan it was made from."""

    plan: Plan
    manager: KVCacheManager
    transceiver: KvCacheTransceiver | None
    """None where the transceiver is off."""
    parent: Inheritance | None = None
    """How the plugins compare with those of the process that started this one; None = nobody told."""

    def shutdown(self) -> None:
        """Shut the transceiver down, then the manager, unless something may still write to its memory; idempotent."""
        try:
            if self.transceiver is not None:
                self.transceiver.shutdown()
                released(self.transceiver)
        finally:
            shut_down_manager(self.manager, self.transceiver)


def resolve(
    args: EngineArgs | Mapping[str, Any],
    *,
    model: ModelSpec | str | Path | None,
    registry: Registry,
    environ: Mapping[str, str],
    execution_architecture: str | None = None,
) -> Plan:
    """Decide what a deployment gets, and why; ``make_plan`` is the pure part.

    Args:
        args: the engine configuration.
        model: what is known of the checkpoint, or where it is; a text that is an identifier and no existing path is
            an architecture's name. None = no model.
        registry: whose active plugins are asked.
        environ: the environment; pass ``os.environ``, or ``{}``.
        execution_architecture: what the loader runs the checkpoint with, where it differs.

    Raises:
        KvferryError: the one thing that stands in the way; several as a ResolutionError, in the order of the steps.
    """
    if not isinstance(args, EngineArgs):
        args = parse_engine_args(args)
    return make_plan(
        args,
        model=_model_spec(model),
        registry=registry,
        environ=environ,
        execution_architecture=execution_architecture,
    )


def build(
    plan: Plan,
    *,
    registry: Registry,
    role: Role,
    geometry: ModelGeometry,
    model_identity: Mapping[str, str],
    device: str | None = None,
    bind: str = "tcp://127.0.0.1:0",
    on_event: Callable[[TransferEvent], None] | None = None,
    ranks: RankSpec | None = None,
    locked: bool = False,
) -> WorkerParts:
    """Make the manager and the transceiver of a plan, asking the plugins that it names and no others.

    Args:
        plan: from ``resolve``.
        registry: the one that the plan was resolved with.
        role: the side that this worker serves.
        geometry: the whole model's KV cache; see ``kvferry.checkpoint.model_geometry``.
        model_identity: for the handshake: ``config`` and ``weights`` digests, ``architecture``.
        device: ``cpu`` or ``cuda:N``; None = as the configuration says.
        bind: where the control socket listens.
        on_event: told the end of every transfer, beside the observers.
        ranks: which rank of its instance this process is, and where the instance meets; None = the only one.
        locked: whether a peer or a parent whose plugins differ is refused, not only named in a warning.

    Raises:
        ConfigError: the model cannot be shared out over the ranks, or these are others than the plan says.
        BackendUnavailableError: a library is not installed here, or a part is not there yet.
        HookError: a maker failed. What was built before it is shut down.
        ForkedProcessError: this process is a fork of one that has a transceiver.
        PluginLoadError: ``locked``, and the process that started this one has other plugins.
    """
    require_no_parent()
    parent = _compare_with_parent(registry, locked=locked)
    registry.plan_resolved(plan)
    _log_plan(plan)
    _require_libraries(plan, registry)
    device = device or _device(plan)
    topology = _topology(plan, ranks)
    geometry = local_geometry(geometry, topology, ranks.rank if ranks is not None else 0)
    with contextlib.ExitStack() as undo:
        manager = registry.create_kv_cache_manager(
            plan.providers.manager or "", manager_spec(plan, registry, geometry, device)
        )
        undo.callback(manager.shutdown)
        transceiver = None
        if plan.runtime is not None:
            rest = {"role": role, "manager": manager, "model": model_identity, "bind": bind, "device": device}
            rest |= {"ranks": ranks, "locked": locked}
            transceiver = _make_transceiver(plan, registry, on_event=on_event, **rest)
        undo.pop_all()
    return WorkerParts(plan, manager, transceiver, parent)


def _compare_with_parent(registry: Registry, *, locked: bool) -> Inheritance | None:
    """Warn of what differs from the process that started this one, or refuse it."""
    parent = inheritance_of(registry, os.environ)
    if parent is None or parent.pid == os.getpid():
        return None
    if locked:
        parent.require_same()
    for warning in parent.warnings:
        log.warning("%s", warning)
    return parent


def _make_transceiver(
    plan: Plan, registry: Registry, *, on_event: Callable[[TransferEvent], None] | None, **rest: Any
) -> KvCacheTransceiver:
    spec = TransceiverSpec(
        runtime=plan.runtime or "",
        backend=plan.backend or "",
        create_agent=agent_maker(plan, registry),
        config=plan.effective["cache_transceiver_config"],
        plugins=registry.plugin_set(),
        plugin_digests=plugin_digests(registry),
        peers=tuple(Peer(**peer) for peer in plan.effective["peers"]),
        on_event=_event_teller(registry, on_event),
        **rest,
    )
    log.info("Using %s", _class_name(plan, registry))
    provider = plan.providers.runtime or ""
    return guard(registry.create_transceiver(provider, spec), _guarded("transceiver", plan, registry, provider))


def missing_libraries(plan: Plan, registry: Registry) -> dict[str, str]:
    """Say what of a plan cannot be built here for want of a library; nothing is imported.

    Returns:
        ``backend``, ``runtime``, ``manager`` → what is missing and what to do; nothing for a part that can be built.
    """
    declared = {
        "backend": _declaration(registry.transfer_backends(), plan.providers.backend, plan.backend),
        "runtime": _declaration(registry.transceiver_runtimes(), plan.providers.runtime, plan.runtime),
        "manager": _declaration(registry.kv_cache_managers(), plan.providers.manager, plan.manager),
    }
    found: dict[str, str] = {}
    for part, declaration in declared.items():
        missing = missing_modules(declaration.requires) if declaration else ()
        if missing:
            remedy = f"; {declaration.install}" if declaration.install else ""
            what = f"{part} {declaration.name} needs {' and '.join(missing)}"
            found[part] = f"{what}, not installed here{remedy}"
    return found


def runtime_of(plan: Plan, registry: Registry) -> TransceiverRuntime | None:
    """What the plan's runtime declares of itself; None where the transceiver is off."""
    declared: TransceiverRuntime | None = _declaration(
        registry.transceiver_runtimes(), plan.providers.runtime, plan.runtime
    )
    return declared


def manager_of(plan: Plan, registry: Registry) -> ManagerKind | None:
    """What the plan's manager declares of itself."""
    declared: ManagerKind | None = _declaration(registry.kv_cache_managers(), plan.providers.manager, plan.manager)
    return declared


def schedule_obstacle(plan: Plan, registry: Registry, style: ScheduleStyle) -> str | None:
    """Say why the plan's runtime cannot start a request that way; None where it declares that it can."""
    runtime = runtime_of(plan, registry)
    if runtime is None or style in runtime.schedule_styles:
        return None
    declared = ", ".join(sorted(each.value for each in runtime.schedule_styles)) or "none"
    able = sorted({each.value.name for each in registry.transceiver_runtimes() if style in each.value.schedule_styles})
    return (
        f"the runtime {runtime.name} does not declare schedule style {style.value} (it declares {declared}); "
        f"use another style, or set {RUNTIME} to {' or '.join(able) or 'one that does'}"
    )


def _declaration(answers: Iterable[Answer[Any]], plugin: str | None, name: str | None) -> Any:
    """Find what a plan's provider declared under the plan's name, or None."""
    return next((each.value for each in answers if each.plugin == plugin and each.value.name == name), None)


def _class_name(plan: Plan, registry: Registry) -> str:
    runtime = runtime_of(plan, registry)
    return runtime.class_name if runtime else str(plan.runtime)


def _log_plan(plan: Plan) -> None:
    for warning in plan.warnings:
        log.warning("%s", warning)
    for line in plan.log:
        log.info("%s", line)


def _require_libraries(plan: Plan, registry: Registry) -> None:
    missing = missing_libraries(plan, registry)
    if missing:
        raise BackendUnavailableError(f"this plan cannot be built here: {'; '.join(missing.values())}")


def _device(plan: Plan) -> str:
    """Return ``cpu`` or ``cuda:0``; ``auto`` takes a GPU if torch sees one."""
    configured = plan.effective["device"]
    if configured == "auto":
        import torch

        configured = "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda:0" if configured == "cuda" else configured


def _topology(plan: Plan, ranks: RankSpec | None) -> Topology:
    """The ranks that share the model; the plan must know of all of them."""
    topology = ranks.topology if ranks is not None else Topology()
    for setting, size in (("tensor_parallel_size", topology.tensor), ("pipeline_parallel_size", topology.pipeline)):
        if plan.effective[setting] != size:
            raise ConfigError(
                f"{setting!r} is {plan.effective[setting]}, but this process is one rank of {size}; start a process a "
                "rank, each told which one it is, or set it to that",
                setting=setting,
            )
    return topology


def manager_spec(plan: Plan, registry: Registry, geometry: ModelGeometry, device: str) -> ManagerSpec:
    """What the plan's manager is built from, on one rank.

    Args:
        plan: from ``resolve``.
        registry: the one that the plan was resolved with.
        geometry: that rank's part of the model.
        device: ``cpu`` or ``cuda:N``.
    """
    config = plan.effective["kv_cache_config"]
    return ManagerSpec(
        kind=plan.manager,
        geometry=geometry,
        tokens_per_block=config["tokens_per_block"],
        max_tokens=config["max_tokens"],
        free_memory_fraction=config["free_gpu_memory_fraction"],
        enable_block_reuse=config["enable_block_reuse"],
        device=device,
        shared=wants_shared_pools(plan, registry),
        options=config,
        max_batch_size=plan.effective["max_batch_size"],
        max_seq_len=plan.effective["max_seq_len"],
    )


def wants_shared_pools(plan: Plan, registry: Registry) -> bool:
    """Whether the plan's runtime writes to peers of the same host through shared memory, and may."""
    runtime = runtime_of(plan, registry)
    if plan.runtime is None or runtime is None or not runtime.shared_pools:
        return False
    return bool(plan.effective["cache_transceiver_config"]["kv_transfer_shared_memory"])


def agent_maker(plan: Plan, registry: Registry) -> Callable[[AgentSpec], TransferAgent]:
    """Bind the plan's backend provider, so that a runtime cannot ask another one."""
    provider = plan.providers.backend or ""
    guarded = _guarded("transfer agent", plan, registry, provider)
    return lambda spec: guard(registry.create_transfer_agent(provider, spec), guarded)


def _guarded(what: str, plan: Plan, registry: Registry, plugin: str) -> Guarded:
    record = registry.record(plugin)
    distribution = record.printed_distribution if record is not None else None
    return Guarded(what, plan.runtime or "", plan.backend or "", plugin, distribution)


def _event_teller(
    registry: Registry, on_event: Callable[[TransferEvent], None] | None
) -> Callable[[TransferEvent], None]:
    def tell(event: TransferEvent) -> None:
        registry.transfer_finished(event)
        if on_event is not None:
            on_event(event)

    return tell


def _model_spec(model: ModelSpec | str | Path | None) -> ModelSpec | None:
    if model is None or isinstance(model, ModelSpec):
        return model
    if isinstance(model, str) and model.isidentifier() and not Path(model).exists():
        return ModelSpec(model)
    return load_model_spec(model)
