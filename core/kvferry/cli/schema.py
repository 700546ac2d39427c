"""``kvferry schema``: what a configuration may hold, for editors; what telemetry may hold, for whoever asks."""

import click

from kvferry.cli.output import envelope, json_option, print_json, report_errors
from kvferry.cli.quick import quick

NOTHING = {"document": None}
"""The key of the JSON beyond the envelope, where something fails."""


@click.command()
@click.option("--telemetry", is_flag=True, help="Print the manifest of what telemetry may capture instead.")
@json_option
@quick
@report_errors(fields=NOTHING)
def schema(telemetry: bool, as_json: bool) -> None:
    """Print the JSON Schema of the engine configuration (draft 2020-12).

    Keep it in a file, and begin a configuration with `# yaml-language-server: $schema=FILE`: the editor then completes
    and checks it. It is JSON in any case; under --json it is the `document` of the object that every verb prints.
    """
    if telemetry:
        from kvferry.telemetry.manifest import committed_manifest

        manifest = committed_manifest()
        document, text = manifest.plain(), manifest.text()
    else:
        from kvferry.reference.json_schema import engine_schema, engine_schema_text

        document, text = engine_schema(), engine_schema_text()
    if as_json:
        print_json(envelope(ok=True, document=document))
    else:
        click.echo(text, nl=False)
