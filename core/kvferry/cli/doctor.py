"""``kvferry doctor``: what stands in the way of a hand-off here, why, and what to do about it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvferry.cli.options import plugin_options
from kvferry.cli.output import CHECK_FAILED, envelope, json_option, print_json, report_errors

if TYPE_CHECKING:
    from kvferry.doctor.examination import Diagnosis
    from kvferry.doctor.findings import Finding
    from kvferry.doctor.probes import Probed
    from kvferry.registry.toggles import Toggles

NOTHING_FOUND: Final[Mapping[str, object]] = {
    "findings": [],
    "counts": None,
    "backends": [],
    "plan": None,
    "worker": None,
}
"""The keys of the JSON beyond the envelope, as they are where doctor could not look."""


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="The checkpoint that the configuration is for.")
@click.option("--worker", metavar="ADDRESS", help="Look at a running worker, too: http://HOST:PORT.")
@click.option("--backend", metavar="NAME", help="Probe this backend alone.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Deadline of each process that a probe or an import gets.",
)
@click.option("--strict", is_flag=True, help="Warnings make the exit status 1, too.")
@json_option
@report_errors(fields=NOTHING_FOUND)
@plugin_options
def doctor(
    config: Path | None,
    toggles: "Toggles",
    model: Path | None,
    worker: str | None,
    backend: str | None,
    timeout: float,
    strict: bool,
    as_json: bool,
) -> None:
    """Find what stands in the way of a hand-off here, say why, and what to do.

    Starts every backend's library and imports every plugin, each in a process of its own, which may crash or hang.
    With --config it says whether the plan can be built here. Exit status: 1 if there is an error.
    """
    from kvferry.cli.finding_lines import print_findings, progress_line
    from kvferry.config import load_engine_args
    from kvferry.doctor.examination import Request, examine
    from kvferry.doctor.findings import Severity, count

    args = load_engine_args(config) if config else None
    request = Request(toggles, args, model, worker, backend.upper() if backend else None, timeout)
    with progress_line() as progress:
        diagnosis = examine(request, os.environ, progress)
    counts = count(diagnosis.findings)
    ok = not counts[Severity.ERROR] and not (strict and counts[Severity.WARNING])
    if as_json:
        print_json(_document(diagnosis, ok=ok))
    else:
        print_findings(diagnosis.findings)
    if not ok:
        raise SystemExit(CHECK_FAILED)


def _document(diagnosis: "Diagnosis", *, ok: bool) -> dict[str, object]:
    from dataclasses import asdict

    from kvferry.doctor.findings import Severity, count

    findings = diagnosis.findings
    return envelope(
        ok=ok,
        findings=[asdict(finding) for finding in findings],
        counts=count(findings),
        backends=[_backend(each) for each in diagnosis.probed if each.declared.kind == "backend"],
        plan=diagnosis.planned.plan if diagnosis.planned else None,
        worker=diagnosis.worker,
        warnings=[str(finding) for finding in findings if finding.severity is Severity.WARNING],
        errors=[_error(finding) for finding in findings if finding.severity is Severity.ERROR],
    )


def _backend(probed: "Probed") -> dict[str, Any]:
    report = probed.report or {}
    return {
        "name": probed.declared.name,
        "plugin": probed.record.name,
        "distribution": probed.record.printed_distribution,
        "usable": probed.usable,
        "library": report.get("library"),
        "transports": report.get("transports", []),
        "memory": report.get("memory", []),
        "problems": report.get("problems", []),
        "missing": probed.declared.missing,
        "install": probed.declared.install or None,
        "failure": probed.failure,
        "output": probed.output,
        "seconds": probed.seconds,
    }


def _error(finding: "Finding") -> dict[str, str]:
    return {"type": "Finding", "message": str(finding), "setting": finding.subject}
