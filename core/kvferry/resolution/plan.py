"""Joins the steps: backend, model defaults, runtime, manager; every blocker at once."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvferry.checkpoint import ModelSpec
from kvferry.config import EngineArgs
from kvferry.config.nested import with_leaves
from kvferry.registry.door import Registry
from kvferry.registry.freezing import freeze
from kvferry.registry.selection import find_record
from kvferry.resolution.backend import BackendChoice, choose_backend
from kvferry.resolution.defaults import ModelDefaults, collect_defaults
from kvferry.resolution.manager import ManagerChoice, ManagerQuestion, choose_manager
from kvferry.resolution.rules import broken_rules
from kvferry.resolution.runtime import RuntimeChoice, RuntimeQuestion, choose_runtime
from kvferry.resolution.tiers import check_tiers
from kvferry.resolution.vocabulary import BACKEND, MANAGER, RUNTIME
from kvferry_plugins.errors import KvferryError, PluginLoadError, ResolutionError
from kvferry_plugins.types import Plan, Providers

T = TypeVar("T")


def make_plan(
    args: EngineArgs,
    *,
    model: ModelSpec | None,
    registry: Registry,
    environ: Mapping[str, str],
    execution_architecture: str | None = None,
) -> Plan:
    """Decide what a deployment gets. Pure: the same input gives the same plan, and the input stays as it is.

    Args:
        args: what the user wrote.
        model: the checkpoint; None = no model is known, and none is asked.
        registry: whose active plugins are asked.
        environ: the environment, read only where the transceiver is on.
        execution_architecture: what the loader runs the checkpoint with, where it differs.

    Raises:
        KvferryError: the one thing that stands in the way; several as a ResolutionError, in the order of the steps.
    """
    blockers: list[KvferryError] = []
    executed = execution_architecture or (model.architecture if model else None)
    prefer = _preferences(registry, args, blockers)
    backend = _attempt(blockers, lambda: choose_backend(args, registry=registry, environ=environ, prefer=prefer))
    defaults = (
        _attempt(blockers, lambda: collect_defaults(args, model, executed, registry=registry, prefer=prefer))
        or ModelDefaults()
    )
    blockers.extend(broken_rules(args, defaults, model))
    runtime = _attempt(blockers, lambda: choose_runtime(RuntimeQuestion(args, model, registry, prefer, backend)))
    question = ManagerQuestion(args, model, executed, defaults.manager_wishes, registry, prefer, backend, runtime)
    manager = _attempt(blockers, lambda: choose_manager(question))
    warnings = _attempt(blockers, lambda: check_tiers(args, defaults, manager)) if manager else None
    if blockers:
        raise blockers[0] if len(blockers) == 1 else ResolutionError(blockers)
    assert backend is not None
    assert runtime is not None
    assert manager is not None
    return Plan(
        architecture=model.architecture if model else None,
        execution_architecture=executed,
        decisions=(backend.decision, *defaults.decisions, runtime.decision, manager.decision),
        effective=_effective(args, defaults, backend, runtime, manager),
        manager=manager.name,
        backend=backend.decision.value,
        runtime=runtime.name,
        providers=_providers(backend, runtime, manager),
        warnings=(*backend.warnings, *(warnings or ())),
        log=(*runtime.log, *manager.log),
    )


def _attempt(blockers: list[KvferryError], step: Callable[[], T]) -> T | None:
    """Take a step; what stops it joins the blockers, so that the next step is looked at too."""
    try:
        return step()
    except ResolutionError as error:
        blockers.extend(error.blockers)
    except KvferryError as error:
        blockers.append(error)
    return None


def _preferences(registry: Registry, args: EngineArgs, blockers: list[KvferryError]) -> dict[str, str]:
    """Return subject → plugin, from every layer; one that is not active is a blocker."""
    prefer: dict[str, str] = {}
    for subject, name in sorted({**registry.prefer, **args.plugins.prefer}.items()):
        record = _attempt(blockers, lambda name=name: find_record(registry.records(), name))  # type: ignore[misc]
        if record is None:
            continue
        prefer[subject] = record.name
        if not record.is_active:
            message = f"plugins.prefer names {name!r} for {subject}, but {record.describe()}"
            distribution = record.printed_distribution
            blockers.append(PluginLoadError(message, plugin=record.name, distribution=distribution))
    return prefer


def _effective(
    args: EngineArgs, defaults: ModelDefaults, backend: BackendChoice, runtime: RuntimeChoice, manager: ManagerChoice
) -> Mapping[str, Any]:
    decided = {**defaults.values, MANAGER: manager.decision.value}
    if args.cache_transceiver_config is not None:
        decided |= {BACKEND: backend.decision.value, RUNTIME: runtime.decision.value}
    effective: Mapping[str, Any] = freeze(with_leaves(args.model_dump(), decided))
    return effective


def _providers(backend: BackendChoice, runtime: RuntimeChoice, manager: ManagerChoice) -> Providers:
    return Providers(
        backend=backend.backend.plugin if backend.backend else None,
        runtime=runtime.provider.plugin if runtime.provider else None,
        manager=manager.provider.plugin,
    )
