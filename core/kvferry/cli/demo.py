"""``kvferry demo``: prefill in one process, decode in another, and compare."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvferry.cli.children import tell_children
from kvferry.cli.options import open_registry, plugin_options
from kvferry.cli.output import envelope, json_option, print_json, print_warnings, report_errors

if TYPE_CHECKING:
    from kvferry.config import EngineArgs
    from kvferry.demo.report import Compared
    from kvferry.demo.run import Speaker
    from kvferry.registry.door import Registry
    from kvferry.registry.toggles import Toggles
    from kvferry_plugins.types import Plan, ScheduleStyle

NOT_RUN: dict[str, object] = {"plan": None, "used": None, "prompts": [], "equal": None}
"""The keys of the JSON beyond the envelope, where the demo does not run."""

MANAGERS: dict[str, object] = {"auto": "auto", "V1": False, "V2": True}

POOL_TOKENS = 8192
"""KV capacity of each engine, unless --config says otherwise."""


@click.command()
@click.option(
    "--model",
    default="smollm2",
    show_default=True,
    help="smollm2, gemma3, or the path of a checkpoint's folder or a .gguf file.",
)
@click.option("--prompt", "prompts", multiple=True, help="What to ask; repeatable.")
@click.option("--backend", help="The transport; NIXL if neither this nor --config names one.")
@click.option(
    "--runtime",
    type=click.Choice(["auto", "PYTHON", "CPP"], case_sensitive=False),
    help="The transceiver's; PYTHON if neither this nor --config names one.",
)
@click.option("--manager", type=click.Choice(list(MANAGERS), case_sensitive=False), help="The KV-cache manager.")
@click.option("--no-reuse", is_flag=True, help="Compute and send every prompt whole, whatever is known of it.")
@click.option(
    "--schedule",
    type=click.Choice(["context-first", "generation-first"]),
    default="context-first",
    show_default=True,
    help="Which worker hears of a prompt's blocks first: generation-first, they travel while others are computed.",
)
@click.option("--pipelined", is_flag=True, help="Send each chunk of a prefill while the next is computed.")
@click.option("--max-tokens", type=click.IntRange(1), default=32, show_default=True, help="Of each output.")
@click.option(
    "--prefill-chunk",
    type=click.IntRange(1),
    help="Tokens a step; 512 if not given, 256 where hand-offs are pipelined.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what both workers did to FILE.json, which ui.perfetto.dev opens.",
)
@json_option
@report_errors(fields=NOT_RUN)
@plugin_options
def demo(
    config: Path | None,
    toggles: "Toggles",
    model: str,
    prompts: tuple[str, ...],
    backend: str | None,
    runtime: str | None,
    manager: str | None,
    no_reuse: bool,
    schedule: str,
    pipelined: bool,
    max_tokens: int,
    prefill_chunk: int | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Prefill in one process, decode in another, and compare with one process that does both.

    Exit status 1 if an output differs from aggregated decoding, or a worker fails.
    """
    _require_texts(prompts)
    from kvferry.cli.explain import plain_plan
    from kvferry.config import load_engine_args, parse_engine_args
    from kvferry.demo.progress import progress_view
    from kvferry.integrations.checkpoints import find_checkpoint
    from kvferry.tracing.perfetto import require_trace

    if trace is not None:
        require_trace(trace)
    written = load_engine_args(config) if config else parse_engine_args({})
    settings = demo_settings(written, backend, runtime, manager, no_reuse=no_reuse, pipelined=pipelined)
    registry = open_registry(toggles)
    tell_children(registry)
    with progress_view() as view:
        folder = find_checkpoint(model, view.stage)
    plan = buildable_plan(settings, folder, registry)
    style = _schedule_style(schedule, plan, registry)
    _require_key()
    warnings = (*registry.warnings, *plan.warnings)
    if not as_json:
        from kvferry.cli.plan_tables import print_plan

        print_plan(plan, model=model)
        print_warnings(warnings)

    from kvferry.demo.prompts import DEFAULT_PROMPTS
    from kvferry.demo.report import plain_results, print_results, used, used_line
    from kvferry.demo.run import DemoOptions, run_demo
    from kvferry.serving.worker import default_prefill_chunk

    options = DemoOptions(
        settings=settings,
        backend=plan.backend or "",
        folder=folder,
        prompts=prompts or DEFAULT_PROMPTS,
        max_tokens=max_tokens,
        prefill_chunk=prefill_chunk or default_prefill_chunk(plan),
        style=style,
        plugin_arguments=plugin_arguments(),
        trace=trace,
    )
    results = run_demo(options, registry, _speaker(quiet=as_json))
    equal = all(result.equal for result in results)
    if as_json:
        model_entry = {"architecture": plan.architecture, "execution_architecture": plan.execution_architecture}
        fields = {
            "plan": plain_plan(plan, model=model_entry),
            "used": used(plan, style),
            "prompts": plain_results(results),
            "equal": equal,
        }
        print_json({**envelope(ok=equal, warnings=warnings), **fields})
    else:
        click.echo(f"\n{used_line(model, plan, style)}")
        print_results(results)
        click.echo(_verdict(results))
        if trace is not None:
            click.echo(f"trace: {trace} (open it in https://ui.perfetto.dev)")
    raise SystemExit(0 if equal else 1)


def _require_texts(prompts: tuple[str, ...]) -> None:
    from kvferry_plugins.errors import ConfigError

    for prompt in prompts:
        if not prompt:
            raise ConfigError("--prompt '' is empty: write some text, or leave --prompt out", setting="prompt")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            message = f"--prompt {prompt[:80]!r} is no valid Unicode at character {error.start}: write it in UTF-8"
            raise ConfigError(message, setting="prompt") from error


def _require_key() -> None:
    """Say here, and not by both workers, that the key which they share cannot be used. Raises ConfigError."""
    from kvferry.transceiver.keys import load_or_make_key

    load_or_make_key()


def buildable_plan(settings: dict[str, Any], folder: Path, registry: "Registry") -> "Plan":
    """Resolve, and say what is not installed here before anything is started."""
    from kvferry.checkpoint import load_model_spec
    from kvferry.config import parse_engine_args
    from kvferry.dispatcher import missing_libraries, resolve
    from kvferry_plugins.errors import BackendUnavailableError

    args = parse_engine_args(settings)
    plan = resolve(args, model=load_model_spec(folder), registry=registry, environ=os.environ)
    if missing := missing_libraries(plan, registry):
        raise BackendUnavailableError(f"this plan cannot be built here: {'; '.join(missing.values())}")
    return plan


def _schedule_style(schedule: str, plan: "Plan", registry: "Registry") -> "ScheduleStyle":
    """The style that a flag names, if the plan's runtime declares it. Raises ConfigError."""
    from kvferry.dispatcher import schedule_obstacle
    from kvferry_plugins.errors import ConfigError
    from kvferry_plugins.types import ScheduleStyle

    style = ScheduleStyle(schedule.replace("-", "_"))
    if obstacle := schedule_obstacle(plan, registry, style):
        raise ConfigError(f"--schedule {schedule}: {obstacle}", setting="schedule")
    return style


def demo_settings(
    args: "EngineArgs",
    backend: str | None,
    runtime: str | None,
    manager: str | None = None,
    *,
    no_reuse: bool = False,
    pipelined: bool = False,
) -> dict[str, Any]:
    """The workers' configuration: what the operator wrote, the flags over it, and the demo's defaults under it."""
    settings: dict[str, Any] = args.model_dump(mode="json", exclude_unset=True)
    transceiver = {
        "backend": "NIXL",
        "transceiver_runtime": "PYTHON",
        **(settings.get("cache_transceiver_config") or {}),
    }
    if backend is not None:
        transceiver["backend"] = backend
    if runtime is not None:
        transceiver["transceiver_runtime"] = "auto" if runtime.lower() == "auto" else runtime.upper()
    if pipelined:
        transceiver["enable_pipelined_transfer"] = True
    memory = {"dtype": "float32", "max_tokens": POOL_TOKENS, **(settings.get("kv_cache_config") or {})}
    if manager is not None:
        memory["use_kv_cache_manager_v2"] = MANAGERS[manager]
    if no_reuse:
        memory["enable_block_reuse"] = False
    return {**settings, "cache_transceiver_config": transceiver, "kv_cache_config": memory}


def plugin_arguments() -> tuple[str, ...]:
    """The options about plugins as they were given, for the workers."""
    given = click.get_current_context().params
    arguments = [argument for name in given.get("flags", ()) for argument in ("-p", name)]
    return (*arguments, *(("--strict-plugins",) if given.get("strict_plugins") else ()))


def _speaker(*, quiet: bool) -> "Speaker":
    from kvferry.demo.run import Speaker

    if quiet:
        return Speaker(lambda number, prompt: None, lambda text: None, lambda: None)

    def announce(number: int, prompt: str) -> None:
        shown = prompt if len(prompt) <= 160 else f"{prompt[:80]} … {prompt[-60:]}"
        click.echo("\n" + click.style(f"[{number}] {' '.join(shown.split())}", bold=True))

    def show(text: str) -> None:
        click.echo(text, nl=False)

    return Speaker(announce, show, click.echo)


def _verdict(results: "list[Compared]") -> str:
    different = [str(number) for number, result in enumerate(results, 1) if not result.equal]
    if not different:
        return "All outputs equal aggregated decoding, token for token."
    return f"Different from aggregated decoding: prompt {', '.join(different)}."
