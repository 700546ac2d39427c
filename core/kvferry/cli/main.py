"""The group ``kvferry``: its verbs, each imported only when it is run."""

import contextlib
import importlib
import importlib.util
import os
import sys
from typing import Any

import click

VERBS = {
    "bench": ("kvferry.cli.bench:bench", "Measure our transceiver against the raw transport."),
    "demo": ("kvferry.cli.demo:demo", "Prefill in one process, decode in another, and compare."),
    "doctor": ("kvferry.cli.doctor:doctor", "Find what stands in the way of a hand-off here, and say what to do."),
    "explain": ("kvferry.cli.explain:explain", "Say which manager and transceiver a configuration gets, and why."),
    "plugins": ("kvferry.cli.plugins:plugins", "List, inspect, enable and disable plugins."),
    "preflight": ("kvferry.cli.preflight:preflight", "Say what two workers' handshake would, before they are started."),
    "schema": ("kvferry.cli.schema:schema", "Print the configuration's JSON Schema, or what telemetry may hold."),
    "worker": ("kvferry.cli.worker:worker", "Serve the context or the generation side over HTTP."),
}
"""Verb → where it is, and its line in the help."""


class LazyGroup(click.Group):
    """A group whose help needs none of its verbs' modules."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the verbs."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's module."""
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        if importlib.util.find_spec(module) is None:
            raise click.ClickException(f"this installation of kvferry has no verb {cmd_name!r}")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a verb and end, whatever threads the plugins' imports have left behind."""
        try:
            return super().main(*args, **kwargs)
        except SystemExit as error:
            _end_of_the_answer()
            guard = sys.modules.get("kvferry.registry.guard")
            if guard is not None:
                guard.end_despite_threads(error.code)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs' lines."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in sorted(VERBS.items())])


def _end_of_the_answer() -> None:
    """Send what plugins print from here on, as the process ends, to stderr: a program reads stdout."""
    if sys.stdout is None or sys.stdout is not sys.__stdout__:
        return
    stream: Any = sys.stdout
    with contextlib.suppress(OSError, ValueError):  # whoever read it has gone: nothing to keep clean
        stream.flush()
        os.dup2(2, stream.fileno())


def _print_version(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from importlib_metadata import version

        click.echo(f"kvferry {version('kvferry')}")
        context.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show it.")
def main(debug: bool) -> None:
    """Decide which KV-cache manager and transceiver a deployment gets, say why, and ferry the cache.

    Exit status: 0 = fine, 1 = a check failed, 2 = the input is wrong.
    """


if __name__ == "__main__":
    main()
