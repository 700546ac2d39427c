"""A side that does not run yet: from an engine configuration to what its worker would say in the handshake."""

from collections.abc import Mapping
from typing import Any

from kvferry.checkpoint import model_geometry
from kvferry.config import EngineArgs
from kvferry.dispatcher import resolve, runtime_of
from kvferry.preflight.identity import NO_MODEL, GivenModel, model_facts
from kvferry.preflight.planning import planned_layouts
from kvferry.preflight.sides import Fact, Settings, Side, unknown
from kvferry.registry.door import Registry
from kvferry.registry.plugin_set import plugin_digests
from kvferry.resolution.vocabulary import BACKEND, RUNTIME
from kvferry.transceiver.fingerprint import GEOMETRY, make_fingerprint
from kvferry.transceiver.wire import PROTOCOL
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.layout import KvLayout
from kvferry_plugins.types import ModelGeometry, Plan, Role

ASK_WORKER = "give the running worker's address"
INSTALLATION = f"the installation where the worker runs decides: {ASK_WORKER}"
NO_LAYOUT = KvLayout("", (), ())


def side_from_file(
    role: Role,
    source: str,
    args: EngineArgs,
    *,
    registry: Registry,
    environ: Mapping[str, str],
    model: GivenModel | None,
) -> Side:
    """Plan a worker, and say what it would tell a peer.

    Args:
        role: the side that it is to serve.
        source: the file that ``args`` are from.
        args: its engine configuration.
        registry: with the plugins that it would have here.
        environ: the environment that it would have here.
        model: the checkpoint that it is to serve, if that is known.

    Raises:
        KvferryError: it could not be started from that file.
    """
    plan = resolve(args, model=model.spec if model else None, registry=registry, environ=environ)
    layouts, obstacle = _layouts(plan, registry, model)
    facts = _facts(plan, registry, model, layouts, obstacle)
    runtime = runtime_of(plan, registry)
    return Side(
        role=role,
        source=source,
        facts=facts,
        settings=Settings(
            transceiver=plan.effective["cache_transceiver_config"] if plan.backend else None,
            cache=plan.effective["kv_cache_config"],
            manager=plan.manager,
            runtime=plan.runtime,
            styles=runtime.schedule_styles if runtime else None,
            peers=tuple(peer["endpoint"] for peer in plan.effective["peers"]),
        ),
        layouts=layouts,
        model=model.folder if model else None,
        warnings=plan.warnings,
    )


def _layouts(plan: Plan, registry: Registry, model: GivenModel | None) -> tuple[tuple[KvLayout, ...] | None, str]:
    """The layouts of all ranks; without them, why nobody knows them."""
    if model is None:
        return None, NO_MODEL
    try:
        geometry = _geometry(plan, model)
    except ConfigError as error:
        return None, f"{model.folder} does not tell the cache's shape ({error}); {ASK_WORKER}"
    layouts = planned_layouts(plan, registry, geometry)
    if layouts is None:
        return None, f"manager {plan.manager} declares no layout that could be planned; {ASK_WORKER}"
    return layouts, ""


def _geometry(plan: Plan, model: GivenModel) -> ModelGeometry:
    config = plan.effective["kv_cache_config"]
    dtype, windows = config["dtype"], config["max_attention_window"]
    return model_geometry(model.spec.pretrained_config or {}, dtype, max_attention_window=windows)


def _facts(
    plan: Plan,
    registry: Registry,
    model: GivenModel | None,
    layouts: tuple[KvLayout, ...] | None,
    obstacle: str,
) -> dict[str, Fact]:
    section = plan.effective["cache_transceiver_config"] or {}
    said = make_fingerprint(
        backend=plan.backend or "",
        runtime=plan.runtime or "",
        layout=layouts[0] if layouts else NO_LAYOUT,
        model={},
        checksum=bool(section.get("kv_transfer_checksum", False)),
        libraries={},
        plugins=registry.plugin_set(),
        plugin_digests=plugin_digests(registry),
        is_stage=plan.effective["pipeline_parallel_size"] > 1,
    )
    facts = {name: Fact(value, INSTALLATION) for name, value in said.fields.items()}
    facts |= {name: Fact(said.fields[name]) for name in ("checksum", *GEOMETRY)}
    if layouts is None:
        facts |= dict.fromkeys(GEOMETRY, unknown(obstacle)) | _dtype(plan)
    return {
        **facts,
        **model_facts(model),
        "libraries": unknown(INSTALLATION),
        "backend": Fact(plan.backend, _backend_doubt(plan)),
        "runtime": Fact(plan.runtime, _runtime_doubt(plan, model)),
        "protocol": Fact(list(PROTOCOL), INSTALLATION),
    }


def _dtype(plan: Plan) -> dict[str, Fact]:
    """Which dtype is told by the configuration alone, if it does not leave it to the checkpoint."""
    configured: Any = plan.effective["kv_cache_config"]["dtype"]
    return {} if configured == "auto" else {"dtype": Fact(configured)}


def _backend_doubt(plan: Plan) -> str:
    decision = plan.decision(BACKEND)
    if decision.source == "user" or decision.value is None:
        return ""
    return f"{decision.reason} here: the environment where the worker runs decides; write {BACKEND}: {decision.value}"


def _runtime_doubt(plan: Plan, model: GivenModel | None) -> str:
    decision = plan.decision(RUNTIME)
    if model is not None or plan.runtime is None or decision.source == "user":
        return ""
    return f"{decision.reason}; a model may prefer another: add --model"
