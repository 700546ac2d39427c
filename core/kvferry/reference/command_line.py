"""``docs/reference/command-line.md``: every verb and option, as click knows them."""

from collections.abc import Iterator
from typing import Final

import click

from kvferry.cli.main import main
from kvferry.reference.markdown import bullets, page

INTRODUCTION: Final = """\
`kvferry VERB --help` says the same. Every verb answers with exit status 0 = fine, 1 = a check failed or something
is not here, 2 = the input is wrong. `--json` prints one object that holds at least `schema`, `ok`, `warnings` and
`errors`; without it errors are one paragraph on stderr, and `kvferry --debug VERB` adds the traceback."""


def command_line_page() -> str:
    """Write the page."""
    context = _context(main, "kvferry", None)
    parts = [_command(main, context, level=2)]
    for command, within in _commands(main, context):
        parts.append(_command(command, within, level=2 + within.command_path.count(" ") - 1))
    return page("Command line", "core/kvferry/cli", INTRODUCTION, *parts)


def _commands(group: click.Group, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield every command below a group; a verb that this installation has no module for is left out."""
    for name in group.list_commands(context):
        try:
            command = group.get_command(context, name)
        except click.ClickException:
            continue
        if command is None or command.hidden:
            continue
        within = _context(command, name, context)
        yield command, within
        if isinstance(command, click.Group):
            yield from _commands(command, within)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, max_content_width=10_000)


def _command(command: click.Command, context: click.Context, *, level: int) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"{'#' * level} {context.command_path}", f"```text\n{usage}\n```", _help(command)]
    return "\n\n".join(part for part in [*parts, bullets(_options(command, context))] if part)


def _help(command: click.Command) -> str:
    text = (command.help or command.short_help or "").replace("\b", "")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip())


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.params:
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            names, meaning = record
            yield f"`{names}`: {' '.join(meaning.split())}"
