"""The demo from end to end: start the pair, ask, decode the same alone, compare."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.demo.processes import WorkerProcess
from kvferry.demo.progress import progress_view
from kvferry.demo.reference import Reference, reference_engine
from kvferry.demo.report import Compared
from kvferry.demo.router import ask
from kvferry.registry.door import Registry
from kvferry_plugins.types import Role

CONFIG_NAME = "engine.yaml"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo is told."""

    settings: dict[str, Any]
    """The engine configuration of both workers."""
    folder: Path
    """The checkpoint, converted already."""
    prompts: tuple[str, ...]
    max_tokens: int
    prefill_chunk: int
    plugin_arguments: tuple[str, ...] = ()
    """``-p NAME`` and the like, for the workers."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """Where the text goes as it comes."""

    on_prompt: Callable[[int, str], None]
    on_text: Callable[[str], None]
    on_end: Callable[[], None]


def run_demo(options: DemoOptions, registry: Registry, speaker: Speaker) -> list[Compared]:
    """Run it; every process that it started has ended when it returns or raises.

    Raises:
        WorkerFailedError: a worker did not start, ended, or said an error.
        KvferryError: the reference engine cannot be built here.
    """
    with _running(options, registry) as (context, generation, reference):
        answers = []
        for number, prompt in enumerate(options.prompts, 1):
            speaker.on_prompt(number, prompt)
            answers.append(ask(context, generation, prompt, options.max_tokens, speaker.on_text))
            speaker.on_end()
        with progress_view() as view:
            view.stage("decoding the same in one process, to compare", None)
            return [
                Compared(answer, reference.decode(answer.prompt_token_ids, options.max_tokens)) for answer in answers
            ]


@contextmanager
def _running(options: DemoOptions, registry: Registry) -> Iterator[tuple[WorkerProcess, WorkerProcess, Reference]]:
    with ExitStack() as stack:
        config = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-"))) / CONFIG_NAME
        config.write_text(_yaml(options.settings))
        with progress_view() as view:
            context, generation = (
                stack.enter_context(WorkerProcess(role.value, _arguments(role, config, options), view.say))
                for role in (Role.CONTEXT, Role.GENERATION)
            )
            reference = stack.enter_context(
                reference_engine(
                    options.settings,
                    options.folder,
                    registry,
                    prefill_chunk=options.prefill_chunk,
                    progress=view.stage,
                )
            )
            for worker in (context, generation):
                worker.wait_ready()
        yield context, generation, reference


def _arguments(role: Role, config: Path, options: DemoOptions) -> Sequence[str]:
    return (
        *("--role", role.value),
        *("--model", str(options.folder)),
        *("--config", str(config)),
        *("--prefill-chunk", str(options.prefill_chunk)),
        *options.plugin_arguments,
    )


def _yaml(settings: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(settings)
    return text
