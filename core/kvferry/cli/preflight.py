"""``kvferry preflight``: what two workers would refuse each other for, before they are started."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvferry.cli.options import make_toggles, open_registry
from kvferry.cli.output import CHECK_FAILED, envelope, json_option, print_json, print_warnings, report_errors
from kvferry.cli.quick import quick
from kvferry_plugins.errors import ConfigError, ResolutionError

if TYPE_CHECKING:
    from kvferry.preflight.sides import Side
    from kvferry.preflight.verdicts import Checked
    from kvferry_plugins.types import Role

NOTHING_COMPARED: Final[Mapping[str, object]] = {"sides": None, "fields": [], "counts": None}
"""The keys of the JSON beyond the envelope, as they are where nothing was compared."""

_ADDRESS = re.compile(r"\w+://.*|[^/\s]+:\d+/?")


@click.command()
@click.argument("context")
@click.argument("generation")
@click.option("--model", type=click.Path(path_type=Path), help="The checkpoint that both sides are to serve.")
@click.option("--context-model", type=click.Path(path_type=Path), help="… the context side, where they differ.")
@click.option("--generation-model", type=click.Path(path_type=Path), help="… the generation side.")
@click.option(
    "-p", "--plugin", "flags", multiple=True, metavar="NAME", help="Use a plugin on both sides; no:NAME leaves one out."
)
@click.option("--strict", is_flag=True, help="A warning, or a field of which nobody can tell, is a failure too.")
@json_option
@quick
@report_errors(fields=NOTHING_COMPARED)
def preflight(
    context: str,
    generation: str,
    model: Path | None,
    context_model: Path | None,
    generation_model: Path | None,
    flags: tuple[str, ...],
    strict: bool,
    as_json: bool,
) -> None:
    """Say what the handshake of two workers would, field by field, and what to change on which side.

    CONTEXT and GENERATION are engine configurations (YAML), or addresses of running workers. Builds nothing, and needs
    neither a GPU nor a transport. Exit status: 1 if anything is fatal.
    """
    from kvferry.cli.running_worker import reading
    from kvferry.preflight.comparison import compare_sides
    from kvferry.preflight.pairing import check_pair
    from kvferry.preflight.verdicts import Verdict, count, in_order
    from kvferry_plugins.types import Role

    sides = (
        _side(Role.CONTEXT, context, context_model or model, flags),
        _side(Role.GENERATION, generation, generation_model or model, flags),
    )
    with reading(*(side.source for side in sides if side.running)):
        checked = in_order([*compare_sides(*sides), *check_pair(*sides)])
    counts = count(checked)
    failing = (Verdict.FATAL, Verdict.WARNING, Verdict.UNKNOWN) if strict else (Verdict.FATAL,)
    ok = not any(counts[verdict] for verdict in failing)
    warnings = [*dict.fromkeys(warning for side in sides for warning in side.warnings)]
    if as_json:
        print_json(_document(sides, checked, counts, warnings, ok=ok))
    else:
        from kvferry.cli.preflight_table import print_comparison

        print_comparison(sides, checked)
        print_warnings(warnings)
    if not ok:
        raise SystemExit(CHECK_FAILED)


def _side(role: "Role", source: str, model: Path | None, flags: tuple[str, ...]) -> "Side":
    """Read one side. Raises KvferryError, which names it."""
    if not Path(source).exists() and _ADDRESS.fullmatch(source):
        return _running(role, source, flags)
    if not Path(source).exists():
        raise ConfigError(
            f"the {role.value} side {source!r} is neither a file nor a running worker's address; write the path of "
            "its engine configuration, or http://HOST:PORT as the worker's ready line has it"
        )
    try:
        return _planned(role, source, model, flags)
    except ResolutionError as error:
        raise ResolutionError([_named(role, source, blocker) for blocker in error.blockers]) from error
    except ConfigError as error:
        raise _named(role, source, error) from error


def _named(role: "Role", source: str, error: Any) -> Any:
    """Say which side an error is about, unless it names the file already."""
    if not isinstance(error, ConfigError) or source in str(error):
        return error
    return ConfigError(f"the {role.value} side, {source}: {error}", setting=error.setting)


def _running(role: "Role", address: str, flags: tuple[str, ...]) -> "Side":
    from kvferry.cli.running_worker import ask_status, reading
    from kvferry.preflight.workers import side_from_worker

    status = ask_status(address, named=f"the {role.value} side")
    registry = open_registry(make_toggles(None, flags))
    with reading(address):
        return side_from_worker(role, address, status, registry=registry)


def _planned(role: "Role", source: str, model: Path | None, flags: tuple[str, ...]) -> "Side":
    from dataclasses import replace

    from kvferry.config import load_engine_args
    from kvferry.preflight.files import side_from_file
    from kvferry.preflight.identity import find_model

    args = load_engine_args(source)
    registry = open_registry(make_toggles(Path(source), flags))
    given = find_model(model) if model else None
    side = side_from_file(role, source, args, registry=registry, environ=os.environ, model=given)
    return replace(side, warnings=(*registry.warnings, *side.warnings))


def _document(
    sides: "tuple[Side, Side]",
    checked: "list[Checked]",
    counts: Mapping[str, int],
    warnings: list[str],
    *,
    ok: bool,
) -> dict[str, object]:
    from dataclasses import asdict

    from kvferry.preflight.verdicts import Verdict

    return envelope(
        ok=ok,
        sides={side.role.value: _described(side) for side in sides},
        fields=[asdict(each) for each in checked],
        counts=counts,
        warnings=[*warnings, *(str(each) for each in checked if each.verdict is Verdict.WARNING)],
        errors=[
            {"type": "Difference", "message": str(each), "setting": each.field}
            for each in checked
            if each.verdict is Verdict.FATAL
        ],
    )


def _described(side: "Side") -> dict[str, object]:
    return {
        "source": side.source,
        "running": side.running,
        "model": str(side.model) if side.model else None,
        "backend": side.fact("backend").value,
        "runtime": side.settings.runtime,
        "kv_cache_manager": side.settings.manager,
    }
