"""What is wrong with the plugins themselves: pure, from what their inspection brought back."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvferry.doctor.findings import Area, Finding, Severity
from kvferry.registry.inspection import Declared, Inspected
from kvferry.registry.records import Origin, PluginRecord, State
from kvferry.registry.selection import Selection

SLOW_SECONDS = 1.0
"""An import that takes longer is worth a line: every verb pays it."""


def plugin_findings(
    selection: Selection, inspected: Sequence[Inspected], discovery_warnings: Iterable[str]
) -> list[Finding]:
    """Look at every plugin.

    Args:
        selection: what the toggles left.
        inspected: the plugins that were imported, each aside.
        discovery_warnings: what was odd about the distributions.
    """
    warnings = [*discovery_warnings, *selection.warnings]
    settled = [record for record in selection.records if record.state is not State.DISCOVERED]
    return [
        *(_toggle(Severity.ERROR, str(error)) for error in selection.errors),
        *(_toggle(Severity.WARNING, warning) for warning in warnings),
        *(finding for record in settled for finding in _not_imported(record)),
        *(finding for one in inspected for finding in _imported(one, inspected)),
        *_demanded(selection, inspected),
        *_claimed_twice(inspected, selection.prefer),
    ]


def _not_imported(record: PluginRecord) -> Iterator[Finding]:
    if record.state is State.DISABLED:
        yield _about(record, Severity.INFO, f"is disabled {record.reason}")
    elif record.state is State.FAILED:
        yield _about(record, Severity.ERROR, f"is not loaded: {record.reason}")


def _imported(one: Inspected, inspected: Iterable[Inspected]) -> Iterator[Finding]:
    record = one.record
    if record.state is State.FAILED:
        yield _failed(one)
        return
    for problem in one.problems:
        what, _, fix = problem.rpartition("; ")
        yield _about(record, Severity.ERROR, what.partition(": ")[2] or what, fix=fix)
    if record.conduct:
        what = f"its import {'; it '.join(record.conduct)}"
        yield _about(record, Severity.WARNING, what, fix="an import should do nothing of that; tell its author")
    if record.origin is Origin.BUILTIN:
        return
    heavy = one.new_modules & (
        {"torch"} | {name for each in inspected for made in each.declared for name in made.requires}
    )
    if heavy:
        what = f"imports {', '.join(sorted(heavy))} when it is imported: every verb waits for it"
        yield _about(record, Severity.WARNING, what, fix="import inside the hook that needs it")
    elif (record.import_seconds or 0) > SLOW_SECONDS:
        what = f"takes {record.import_seconds:.1f} s to import: every verb waits for it"
        yield _about(record, Severity.WARNING, what, fix="import inside the hook that needs it")


def _failed(one: Inspected) -> Finding:
    record = one.record
    cause = " ← ".join(record.causes[1:])
    fix = f"mend or reinstall {record.distribution}; until then: kvferry plugins disable {record.name}"
    return _about(record, Severity.ERROR, f"is not loaded: {record.reason}", cause=cause, fix=fix)


def _demanded(selection: Selection, inspected: Iterable[Inspected]) -> Iterator[Finding]:
    active = {one.record.name for one in inspected if one.record.is_active}
    records = {record.name: record for record in selection.records if record.name not in active}
    demands = [
        *((required.name, "required", required.by) for required in selection.required),
        *(
            (name, f"preferred for {subject}", selection.prefer_by[subject])
            for subject, name in selection.prefer.items()
        ),
    ]
    for name, demand, by in demands:
        if name in records:
            what = f"is {demand} by {by}, and is not active: no worker starts"
            yield _about(records[name], Severity.ERROR, what, fix=f"mend or enable it, or take that out of {by}")


def _claimed_twice(inspected: Iterable[Inspected], prefer: Mapping[str, str]) -> Iterator[Finding]:
    claims: dict[tuple[str, str], list[PluginRecord]] = defaultdict(list)
    for one in inspected:
        for made in one.declared:
            claims[made.kind, made.name].append(one.record)
    for (kind, name), records in sorted(claims.items()):
        if len(records) > 1:
            yield from _contest(kind, name, records, prefer.get(name))


def _contest(kind: str, name: str, records: list[PluginRecord], preferred: str | None) -> Iterator[Finding]:
    best = max(record.rank for record in records)
    winners = [record for record in records if record.name == preferred] or [
        record for record in records if record.rank is best
    ]
    if len(winners) > 1:
        listed = " and ".join(f"{record.name} ({record.printed_distribution})" for record in winners)
        what = f"brings the {kind} {name}, and so does another of its rank: {listed}"
        fix = f"settle it with plugins.prefer: {{{name}: {winners[0].name}}}"
        yield _about(winners[0], Severity.ERROR, what, fix=fix)
        return
    for record in records:
        if record is not winners[0]:
            why = "by plugins.prefer" if winners[0].name == preferred else f"as the {winners[0].rank.name.lower()} one"
            what = f"brings the {kind} {name}, and is shadowed by {winners[0].name}, which wins {why}"
            yield _about(record, Severity.INFO, what, fix=f"plugins.prefer: {{{name}: {record.name}}} turns that round")


def unavailable_findings(inspected: Iterable[Inspected]) -> Iterator[Finding]:
    """Say which runtimes and managers lack a library; a plan that needs one is another finding, and worse."""
    for one in inspected:
        for made in one.declared:
            if made.kind != "backend" and made.missing:
                yield _unavailable(one.record, made)


def _unavailable(record: PluginRecord, made: Declared) -> Finding:
    what = f"{made.kind} {made.name} is not available: {' and '.join(made.missing)} not installed"
    return _about(record, Severity.INFO, what, fix=made.install)


def _about(record: PluginRecord, severity: Severity, what: str, *, cause: str = "", fix: str = "") -> Finding:
    return Finding(
        Area.PLUGINS,
        severity,
        record.name,
        what,
        cause,
        fix,
        plugin=record.name,
        distribution=record.printed_distribution,
    )


def _toggle(severity: Severity, text: str) -> Finding:
    what, _, fix = text.rpartition("; ")
    return Finding(Area.PLUGINS, severity, "plugins", what or text, fix=fix if what else "")
