"""The demo from end to end: start the pair, ask, decode the same alone, compare."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from kvferry.demo.processes import WorkerProcess, started, worker_arguments
from kvferry.demo.progress import progress_view
from kvferry.demo.reference import Reference, reference_engine
from kvferry.demo.report import Compared
from kvferry.demo.router import ask
from kvferry.launch.together import launcher_of
from kvferry.registry.door import Registry
from kvferry.tracing.perfetto import merge
from kvferry_plugins.types import Role, ScheduleStyle

CONFIG_NAME = "engine.yaml"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo is told."""

    settings: dict[str, Any]
    """The engine configuration of both workers."""
    backend: str
    """Effective: how the workers are started is its say."""
    folder: Path
    """The checkpoint, converted already."""
    prompts: tuple[str, ...]
    max_tokens: int
    prefill_chunk: int
    style: ScheduleStyle = ScheduleStyle.CONTEXT_FIRST
    plugin_arguments: tuple[str, ...] = ()
    """``-p NAME`` and the like, for the workers."""
    trace: Path | None = None
    """Where both workers' traces go, as one."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """Where the text goes as it comes."""

    on_prompt: Callable[[int, str], None]
    on_text: Callable[[str], None]
    on_end: Callable[[], None]


def run_demo(options: DemoOptions, registry: Registry, speaker: Speaker) -> list[Compared]:
    """Run it; every process that it started has ended when it returns or raises.

    Raises:
        ConfigError: a prompt cannot be served.
        WorkerFailedError: a worker did not start, ended, or said an error.
        KvferryError: the reference engine cannot be built here.
    """
    with _ended_by_signals(), _running(options, registry) as (context, generation, reference):
        answers = []
        for number, prompt in enumerate(options.prompts, 1):
            speaker.on_prompt(number, prompt)
            answers.append(ask(context, generation, prompt, options.max_tokens, speaker.on_text, options.style))
            speaker.on_end()
        with progress_view() as view:
            view.stage("decoding the same in one process, to compare", None)
            return [
                Compared(answer, reference.decode(answer.prompt_token_ids, options.max_tokens)) for answer in answers
            ]


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Clean up on SIGTERM and SIGHUP as on Ctrl-C; one that is ignored, as under nohup, stays so. The main thread's."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


@contextmanager
def _running(options: DemoOptions, registry: Registry) -> Iterator[tuple[WorkerProcess, WorkerProcess, Reference]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-")))
        config = folder / CONFIG_NAME
        config.write_text(_yaml(options.settings))
        traces = {role: folder / f"{role.value}.json" if options.trace is not None else None for role in Role}
        if options.trace is not None:  # the workers write theirs as they end
            stack.callback(merge, [path for path in traces.values() if path is not None], options.trace)
        with progress_view() as view:
            arguments = partial(
                worker_arguments,
                folder=options.folder,
                config=config,
                prefill_chunk=options.prefill_chunk,
                plugin_arguments=options.plugin_arguments,
            )
            workers = [
                WorkerProcess(role.value, arguments(role, trace=traces[role]), view.say)
                for role in (Role.CONTEXT, Role.GENERATION)
            ]
            wait_ready = stack.enter_context(started(workers, launcher_of(options.backend, registry)))
            reference = stack.enter_context(
                reference_engine(
                    options.settings,
                    options.folder,
                    registry,
                    prefill_chunk=options.prefill_chunk,
                    progress=view.stage,
                )
            )
            wait_ready()
        context, generation = workers
        yield context, generation, reference


def _yaml(settings: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(settings)
    return text
