"""A side that runs: from a worker's own status to what it says in the handshake."""

from collections.abc import Mapping
from typing import Any

from kvferry.preflight.sides import NOTHING, Fact, Settings, Side, unknown
from kvferry.registry.door import Registry
from kvferry.transceiver.fingerprint import SEVERITY
from kvferry_plugins.types import Role, ScheduleStyle

SILENT = "the worker's transceiver does not say it (its status has no fingerprint)"


def side_from_worker(role: Role, address: str, status: Mapping[str, Any], *, registry: Registry) -> Side:
    """Read what a worker says of itself.

    Args:
        role: the side that the operator takes it for.
        address: as the operator wrote it.
        status: its ``/status``.
        registry: whose runtimes say which schedule styles they have.
    """
    plan, transceiver = status["plan"], status["transceiver"]
    runtime, fingerprint = plan["transceiver"]["runtime"], transceiver.get("fingerprint") or NOTHING
    return Side(
        role=role,
        source=address,
        facts=_facts(plan, fingerprint),
        settings=Settings(
            transceiver=plan["effective"]["cache_transceiver_config"] if runtime else None,
            cache=plan["effective"]["kv_cache_config"],
            manager=plan["kv_cache_manager"],
            runtime=runtime,
            styles=_styles(registry, runtime),
            peers=_peers(transceiver),
            endpoint=transceiver.get("endpoint"),
        ),
        running=True,
        locked=bool(fingerprint.get("locked")),
        said_role=status["role"],
    )


def _facts(plan: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> dict[str, Fact]:
    said = fingerprint.get("fields") or NOTHING
    facts = {name: Fact(said[name]) if name in said else unknown(SILENT) for name in SEVERITY}
    for name in ("backend", "runtime"):  # of which its plan tells, too
        if name not in said:
            facts[name] = Fact(plan["transceiver"][name])
    protocol = fingerprint.get("protocol")
    return {**facts, "protocol": Fact(list(protocol)) if protocol else unknown(SILENT)}


def _styles(registry: Registry, runtime: str | None) -> frozenset[ScheduleStyle] | None:
    declared = (answer.value for answer in registry.transceiver_runtimes() if answer.value.name == runtime)
    return next((each.schedule_styles for each in declared), None)


def _peers(transceiver: Mapping[str, Any]) -> tuple[str, ...] | None:
    peers = transceiver.get("trusted_peers")
    return tuple(peers) if peers is not None else None
