"""``kvferry worker``: one side of a deployment, behind HTTP."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvferry.cli.kept_stdout import kept_stdout
from kvferry.cli.options import open_registry, plugin_options
from kvferry.cli.output import json_option, print_warnings, report_errors
from kvferry.folders import working_folder

if TYPE_CHECKING:
    from kvferry.integrations.checkpoints import Progress
    from kvferry.registry.toggles import Toggles
    from kvferry.serving.worker import Ready

NOT_READY = {"ready": False, "http": None, "control": None, "pid": None, "metrics": None}
"""The keys of the JSON beyond the envelope, where the worker does not start."""


@click.command()
@click.option("--role", type=click.Choice(["context", "generation"]), required=True, help="Which side to serve.")
@click.option("--model", required=True, help="A checkpoint's folder, a .gguf file, or a name such as smollm2.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where HTTP listens; loopback only.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="0 = any free one.")
@click.option(
    "--control-bind",
    default="tcp://127.0.0.1:0",
    show_default=True,
    metavar="ENDPOINT",
    help="Where the control socket listens.",
)
@click.option(
    "--prefill-chunk",
    type=click.IntRange(1),
    help="Tokens of a prompt that one step takes; 512 if not given, 256 with enable_pipelined_transfer.",
)
@click.option(
    "--drain-seconds", type=click.FloatRange(0), default=30.0, show_default=True, help="Deadline of a SIGTERM."
)
@click.option(
    "--threads", type=click.IntRange(1), help="Threads that torch computes with; half of the cores if not given."
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve metrics on a loopback port of their own too, which answers whatever HTTP does; 0 = any free one.",
)
@click.option(
    "--stall-seconds",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="A thread that is so long at one piece of work makes the worker not ready.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a trace to FILE at the end and on SIGUSR2; ui.perfetto.dev opens it.",
)
@click.option(
    "--locked",
    is_flag=False,
    flag_value="",
    metavar="[FILE]",
    help="Refuse to start unless the plugins are those of kvferry.lock, or FILE, and refuse peers whose plugins "
    "differ; KVFERRY_LOCKED=1 does too.",
)
@json_option
@report_errors(fields=NOT_READY)
@plugin_options
def worker(
    config: Path | None,
    toggles: "Toggles",
    role: str,
    model: str,
    host: str,
    port: int,
    control_bind: str,
    prefill_chunk: int | None,
    drain_seconds: float,
    threads: int | None,
    metrics_port: int | None,
    stall_seconds: float,
    trace: Path | None,
    locked: str | None,
    as_json: bool,
) -> None:
    """Serve the context or the generation side over HTTP.

    Prints one line once it is ready: with --json an object with http, control, pid and metrics. SIGTERM drains: exit
    status 0 when nothing is left, 1 at the deadline. SIGUSR1 writes the status and all stacks to stderr, SIGUSR2 the
    trace so far.
    """
    import logging

    from kvferry.config import load_engine_args, parse_engine_args
    from kvferry.registry.locking import wanted_lock

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    args = load_engine_args(config) if config else parse_engine_args({})
    lock = wanted_lock(locked, os.environ, working_folder())
    registry = open_registry(toggles, lock)
    _require_serve_extra()
    from kvferry.serving.worker import WorkerOptions, run_worker
    from kvferry_plugins.types import Role

    print_warnings(registry.warnings)
    options = WorkerOptions(Role(role), model, host, port, control_bind, prefill_chunk, drain_seconds, threads)
    options = replace(
        options,
        locked=lock is not None,
        metrics_port=metrics_port,
        stall_seconds=stall_seconds,
        trace=trace,
    )
    with kept_stdout() as stdout:

        def tell_ready(ready: "Ready") -> None:
            print(_ready_line(ready, role, as_json), file=stdout, flush=True)

        raise SystemExit(run_worker(options, args, registry, progress=tell_progress(), on_ready=tell_ready))


def tell_progress() -> "Progress":
    """Progress as lines on stderr: one a stage, and one each ten per cent."""
    last: tuple[str, int] | None = None

    def tell(stage: str, fraction: float | None) -> None:
        nonlocal last
        tenth = int((fraction or 0.0) * 10)
        if (stage, tenth) != last:
            last = (stage, tenth)
            click.echo(f"progress: {stage}" + (f", {tenth * 10} %" if fraction is not None else ""), err=True)

    return tell


def _require_serve_extra() -> None:
    from importlib.util import find_spec

    from kvferry_plugins.errors import BackendUnavailableError

    needed = ("torch", "transformers", "starlette", "uvicorn", "prometheus_client")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise BackendUnavailableError(
            f"a worker needs {' and '.join(missing)}, not installed here; pip install 'kvferry[serve]'"
        )


def _ready_line(ready: "Ready", role: str, as_json: bool) -> str:
    if as_json:
        return json.dumps({"ready": True, "role": role, **asdict(ready)})
    metrics = f", metrics {ready.metrics}" if ready.metrics else ""
    return f"{role} worker ready: {ready.http} (control {ready.control}, pid {ready.pid}{metrics})"
