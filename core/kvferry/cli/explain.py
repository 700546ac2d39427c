"""``kvferry explain``: what a configuration and a checkpoint lead to, and why, before anything starts."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvferry.cli.options import open_registry, plugin_options
from kvferry.cli.output import envelope, fail, json_option, print_json, print_warnings, report_errors
from kvferry.cli.quick import quick

if TYPE_CHECKING:
    from kvferry.checkpoint import ModelSpec
    from kvferry.registry.toggles import Toggles
    from kvferry_plugins.types import Plan

NOTHING_RESOLVED: Final[Mapping[str, object]] = {
    "model": None,
    "decisions": [],
    "effective": None,
    "kv_cache_manager": None,
    "transceiver": {"enabled": False, "runtime": None, "backend": None, "provider": None},
    "providers": {"backend": None, "runtime": None, "manager": None},
}
"""The keys of the JSON beyond the envelope, as they are where there is no plan."""


@click.command()
@click.option(
    "--model", type=click.Path(path_type=Path), help="A folder with a config.json, that file, or what a worker takes."
)
@click.option(
    "--execution-architecture",
    metavar="NAME",
    help="What the loader runs the checkpoint with, where that is not what the checkpoint names.",
)
@click.option("--worker", metavar="ADDRESS", help="Ask a running worker for its own plan and state.")
@json_option
@quick
@report_errors(fields=NOTHING_RESOLVED)
@plugin_options
def explain(
    config: Path | None,
    toggles: "Toggles",
    model: Path | None,
    execution_architecture: str | None,
    worker: str | None,
    as_json: bool,
) -> None:
    """Say which manager and transceiver a configuration gets, and why.

    Builds nothing, and answers alike on any machine: what is not installed here is a warning.
    """
    if worker is not None:
        _explain_worker(worker, as_json=as_json)
        return
    from kvferry.checkpoint import load_model_spec
    from kvferry.config import load_engine_args, parse_engine_args
    from kvferry.dispatcher import missing_libraries, resolve
    from kvferry.integrations.checkpoints import find_configuration

    args = load_engine_args(config) if config else parse_engine_args({})
    spec = load_model_spec(find_configuration(model)) if model else None
    registry = open_registry(toggles)
    try:
        plan = resolve(
            args,
            model=spec,
            registry=registry,
            environ=os.environ,
            execution_architecture=execution_architecture,
        )
        missing = missing_libraries(plan, registry)
    except Exception as error:
        known = {**NOTHING_RESOLVED, "model": _model(spec, execution_architecture)}
        fail(error, as_json=as_json, fields=known, warnings=registry.warnings)
    warnings = (*registry.warnings, *plan.warnings, *missing.values())
    if as_json:
        fields = plain_plan(plan, model=_model(spec, execution_architecture), missing=frozenset(missing))
        print_json({**envelope(ok=True, warnings=warnings), **fields})
        return
    from kvferry.cli.plan_tables import print_plan

    print_plan(plan, model=str(model) if model else None)
    print_warnings(warnings)


def _explain_worker(address: str, *, as_json: bool) -> None:
    """Show the plan that a running worker was built from, and how it is."""
    from kvferry.cli.running_worker import ask_status, reading

    status = ask_status(address)
    with reading(address):
        _print_worker(status, as_json=as_json)


def _print_worker(status: "dict[str, Any]", *, as_json: bool) -> None:
    from kvferry.cli.running_worker import plan_of, print_state

    plan = status.pop("plan")
    if as_json:
        print_json({**envelope(ok=True, warnings=plan["warnings"]), **plan, "worker": status})
        return
    from kvferry.cli.plan_tables import print_plan

    print_plan(plan_of({"plan": plan}), model=status["model"])
    print_state(status)
    print_warnings(plan["warnings"])


def plain_plan(plan: "Plan", *, model: object, missing: frozenset[str] = frozenset()) -> dict[str, object]:
    """Describe a plan as ``explain --json`` prints it.

    Args:
        plan: the plan.
        model: the ``model`` entry; None where no model was given.
        missing: the parts (``backend``, ``runtime``, ``manager``) whose library is not installed here.
    """
    from dataclasses import asdict

    built = not missing & {"backend", "runtime"}
    return {
        "model": model,
        "decisions": [asdict(decision) for decision in plan.decisions],
        "effective": {name: plan.effective[name] for name in ("kv_cache_config", "cache_transceiver_config")},
        "kv_cache_manager": plan.manager,
        "transceiver": {
            "enabled": plan.runtime is not None,
            "runtime": plan.runtime,
            "backend": plan.backend,
            "provider": plan.providers.runtime if built else None,
        },
        "providers": {part: None if part in missing else name for part, name in asdict(plan.providers).items()},
    }


def _model(spec: "ModelSpec | None", execution_architecture: str | None) -> dict[str, str | None] | None:
    if spec is None:
        return None
    return {
        "architecture": spec.architecture,
        "execution_architecture": execution_architecture or spec.architecture,
    }
