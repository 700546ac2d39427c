"""The memory that a worker would have, rank by rank, planned by its manager's own declaration."""

import pkgutil

from kvferry.dispatcher import manager_of, manager_spec
from kvferry.registry.door import Registry
from kvferry.topology import local_geometry
from kvferry_plugins.errors import HookError, KvferryError
from kvferry_plugins.layout import KvLayout
from kvferry_plugins.types import ManagerKind, ManagerSpec, ModelGeometry, Plan, Topology

HOOK = "kv_cache_managers"


def planned_layouts(plan: Plan, registry: Registry, geometry: ModelGeometry) -> tuple[KvLayout, ...] | None:
    """Plan the layout of every rank; None where the manager's plugin declares none.

    Args:
        plan: from ``resolve``.
        registry: the one that the plan was resolved with.
        geometry: the whole model's.

    Raises:
        ConfigError: the model cannot be shared out so, or the manager has no place for it.
        HookError: the declared function is not there, raises, or returns something else.
    """
    kind = manager_of(plan, registry)
    if kind is None or not kind.layout:
        return None
    sizes = plan.effective["tensor_parallel_size"], plan.effective["pipeline_parallel_size"]
    topology = Topology(*sizes)
    parts = (local_geometry(geometry, topology, rank) for rank in range(topology.ranks))
    return tuple(_planned(kind, plan, registry, manager_spec(plan, registry, part, "cpu")) for part in parts)


def _planned(kind: ManagerKind, plan: Plan, registry: Registry, spec: ManagerSpec) -> KvLayout:
    try:
        layout = pkgutil.resolve_name(kind.layout)(spec)
    except KvferryError:
        raise
    except Exception as error:
        raise _error(plan, registry, kind, f"raised {type(error).__name__}: {error}") from error
    if not isinstance(layout, KvLayout):
        raise _error(plan, registry, kind, f"returned {type(layout).__name__}, which is no KvLayout")
    return layout


def _error(plan: Plan, registry: Registry, kind: ManagerKind, what: str) -> HookError:
    plugin = plan.providers.manager or ""
    record = registry.record(plugin)
    distribution = record.printed_distribution if record is not None else None
    return HookError(
        f"plugin {plugin!r} ({distribution}): the layout {kind.layout!r} that it declares for manager {kind.name} "
        f"{what}; mend the plugin, or leave it out with -p no:{plugin}",
        hook=HOOK,
        plugin=plugin,
        distribution=distribution,
    )
