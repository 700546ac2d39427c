"""Looks at everything, in an order that lets each step use what the ones before have found."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.doctor.cache_folder import cache_folder_findings
from kvferry.doctor.deployment import Deployment, look_at_machine
from kvferry.doctor.environment import environment_findings
from kvferry.doctor.files import file_findings
from kvferry.doctor.findings import Area, Finding, Severity, in_order
from kvferry.doctor.lock import lock_findings
from kvferry.doctor.peers import peer_findings
from kvferry.doctor.planning import Planned, deployment_of, make_plan_aside, plan_findings
from kvferry.doctor.plugins import plugin_findings, unavailable_findings
from kvferry.doctor.probes import Probed, probe_findings, run_probes
from kvferry.doctor.ucx_copies import copies_findings, find_copies, nixl_versions, version_findings
from kvferry.doctor.workers import difference_findings, worker_findings
from kvferry.folders import working_folder
from kvferry.registry.discovery import Discovery, discover
from kvferry.registry.inspection import Inspected, inspect_plugins
from kvferry.registry.load import raise_all
from kvferry.registry.plugin_set import FilesReader, known_plugins
from kvferry.registry.records import Origin, State
from kvferry.registry.selection import Selection
from kvferry.registry.state_file import record_states, state_file
from kvferry.registry.survey import survey
from kvferry.registry.toggles import Toggles
from kvferry.resolution.selectors import selector_warnings
from kvferry_plugins.errors import ConfigError, KvferryError

if TYPE_CHECKING:
    from kvferry.config import EngineArgs

TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """What doctor is asked to look at."""

    toggles: Toggles
    args: "EngineArgs | None" = None
    """The configuration; None = none, so every backend counts."""
    model: Path | None = None
    worker: str | None = None
    """A running worker's address."""
    backend: str | None = None
    """The one to probe; None = all."""
    timeout: float = TIMEOUT_SECONDS
    """Seconds for each process that is started."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found."""

    findings: tuple[Finding, ...]
    probed: tuple[Probed, ...]
    planned: Planned | None = None
    worker: Mapping[str, Any] | None = None
    """Its status; None = none was asked, or it did not answer."""


def examine(
    request: Request, environ: Mapping[str, str], progress: Callable[[str], None] = lambda stage: None
) -> Diagnosis:
    """Look at plugins, backends, configuration, environment, libraries, files and a worker.

    Nothing of a plugin, and no transport, is imported here: a process of its own does that, and may end as it likes.

    Args:
        request: what to look at.
        environ: the environment; pass ``os.environ``, which the processes inherit.
        progress: told what is being done.

    Raises:
        ConfigError: a ``-p`` names no plugin, ``backend`` is none, or ``worker`` is no address.
    """
    status, unreachable = _ask(request.worker)
    discovery = discover()
    _refuse_unknown_flags(discovery.entries, request.toggles)
    selection = survey(discovery, request.toggles)
    inspected = _inspect(selection, request.timeout, progress)
    record_states(state_file(environ), [one.record for one in inspected])
    _require_declared(request.backend, inspected)
    planned = _plan(request, inspected, progress)
    deployment = deployment_of(request.args, planned)
    probed = run_probes(inspected, only=request.backend, timeout=request.timeout, progress=progress)
    findings = [
        *plugin_findings(selection, inspected, discovery.warnings),
        *unavailable_findings(inspected),
        *lock_findings(discovery, selection, environ, working_folder()),
        *probe_findings(probed, deployment, planned.runtime if planned else None),
        *(plan_findings(planned, _known(selection, environ), _broken(probed)) if planned else ()),
        *cache_folder_findings(_cache_config(request, planned)),
        *environment_findings(environ, deployment, look_at_machine(environ)),
        *_libraries(environ, inspected),
        *file_findings(environ, {record.name for record in selection.records}),
        *(unreachable if status is None else _worker(status, request, deployment, planned, discovery, inspected)),
        *(() if request.worker else peer_findings(deployment.peers)),
    ]
    return Diagnosis(tuple(in_order(findings)), tuple(probed), planned, status)


def _ask(worker: str | None) -> tuple[Mapping[str, Any] | None, list[Finding]]:
    if worker is None:
        return None, []
    from kvferry.cli.running_worker import ask_status

    try:
        return ask_status(worker), []
    except ConfigError:
        raise
    except KvferryError as error:
        what, _, fix = str(error).partition("; ")
        return None, [Finding(Area.WORKER, Severity.ERROR, worker, what, fix=fix)]


def _refuse_unknown_flags(entries: Sequence[Any], toggles: Toggles) -> None:
    flags = Toggles(tuple(layer for layer in toggles.layers if layer.is_flag))
    raise_all(survey(Discovery(tuple(entries)), flags).errors)


def _inspect(selection: Selection, timeout: float, progress: Callable[[str], None]) -> list[Inspected]:
    records = [record for record in selection.records if record.state is State.DISCOVERED]
    left = {record.name for record in records}

    def tell(names: Sequence[str]) -> None:
        left.difference_update(names)
        progress(f"importing plugins: {len(left)} of {len(records)} left")

    tell(())
    return inspect_plugins(records, timeout=timeout, on_end=tell)


def _require_declared(backend: str | None, inspected: Sequence[Inspected]) -> None:
    from kvferry.config.nearest import did_you_mean

    declared = sorted({made.name for one in inspected for made in one.declared if made.kind == "backend"})
    if backend is not None and backend not in declared:
        raise ConfigError(
            f"--backend {backend!r} is declared by no plugin that loads{did_you_mean(backend, declared)}; "
            f"declared: {', '.join(declared) or 'none'}",
            setting="--backend",
        )


def _plan(request: Request, inspected: Sequence[Inspected], progress: Callable[[str], None]) -> Planned | None:
    if request.args is None:
        return None
    progress("resolving the configuration")
    return make_plan_aside(request.args, request.toggles, inspected, model=request.model, timeout=request.timeout)


def _cache_config(request: Request, planned: Planned | None) -> Mapping[str, Any]:
    """The effective ``kv_cache_config``; where there is no plan, what was written."""
    if planned is not None and planned.plan is not None:
        config: Mapping[str, Any] = planned.plan["effective"]["kv_cache_config"]
        return config
    return request.args.kv_cache_config.model_dump() if request.args else {}


def _known(selection: Selection, environ: Mapping[str, str]) -> set[str]:
    return {*selector_warnings(environ), *map(str, selection.errors)}


def _broken(probed: Sequence[Probed]) -> set[str]:
    return {each.declared.name for each in probed if not each.usable and not each.declared.missing}


def _libraries(environ: Mapping[str, str], inspected: Sequence[Inspected]) -> Iterator[Finding]:
    strangers = [one for one in inspected if one.record.origin is not Origin.BUILTIN]
    copies = find_copies(sys.path, environ)
    yield from copies_findings(copies, environ, {one.record.name: one.new_modules for one in strangers})
    yield from version_findings(nixl_versions())


def _worker(
    status: Mapping[str, Any],
    request: Request,
    deployment: Deployment,
    planned: Planned | None,
    discovery: Discovery,
    inspected: Sequence[Inspected],
) -> list[Finding]:
    address = str(request.worker)
    known = known_plugins((one.record for one in inspected), FilesReader(discovery))
    plugins = {each.name: each.printed_distribution for each in known}
    digests = {each.name: each.short_digest for each in known}
    plan = planned.plan if planned else None
    try:
        return [
            *worker_findings(status, address, peers=deployment.peers),
            *difference_findings(status, address, plan=plan, plugins=plugins, digests=digests),
        ]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        what = f"its status is not as this kvferry knows it: {error!r}"
        fix = "look at it with the kvferry that it runs"
        return [Finding(Area.WORKER, Severity.WARNING, address, what, fix=fix)]
