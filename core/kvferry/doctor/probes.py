"""Runs the backends' probes, and imports the runtimes' libraries, each in a process of its own."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.doctor.deployment import Deployment
from kvferry.doctor.findings import Area, Finding, Severity
from kvferry.doctor.ucx_copies import loaded_copies
from kvferry.registry.inspection import Declared, Inspected
from kvferry.registry.isolation import Call, Ending, call_isolated
from kvferry.registry.records import Origin, PluginRecord

AT_ONCE = 4
_SHAPE: Mapping[str, type | tuple[type, ...]] = {
    "usable": bool,
    "library": (str, type(None)),
    "transports": list,
    "problems": list,
}


@dataclass(frozen=True, slots=True)
class Probed:
    """One declared backend or runtime, and how its probe ended."""

    record: PluginRecord
    declared: Declared
    asked_for: bool = False
    """Whether the operator named it."""
    report: Mapping[str, Any] | None = None
    """A ``ProbeReport``; None = there is none, and ``failure`` or the missing modules say why."""
    failure: str | None = None
    output: tuple[str, ...] = ()
    seconds: float | None = None
    ucx_copies: tuple[str, ...] = ()
    """The files of every UCX that its process had loaded in the end."""

    @property
    def usable(self) -> bool:
        """Whether it would work here."""
        return bool(self.report and self.report["usable"])


def run_probes(
    inspected: Iterable[Inspected],
    *,
    only: str | None = None,
    timeout: float,
    progress: Callable[[str], None] = lambda stage: None,
) -> list[Probed]:
    """Probe every backend whose library is installed, and import every runtime's; several at a time.

    Args:
        inspected: the plugins.
        only: the one backend to probe; no runtime's library is imported then.
        timeout: seconds that each may take.
        progress: told which are still to end.
    """
    wanted = [
        Probed(one.record, made, only is not None)
        for one in inspected
        for made in one.declared
        if _is_wanted(made, only)
    ]
    runnable = [each for each in wanted if not each.declared.missing]
    calls = [_call(each.declared) for each in runnable]
    left = {id(call): each.declared.name for call, each in zip(calls, runnable, strict=True)}

    def tell(call: Call, _: Ending) -> None:
        del left[id(call)]
        if left:
            progress(f"probing {', '.join(left.values())}")

    if left:
        progress(f"probing {', '.join(left.values())}")
    endings = call_isolated(calls, timeout=timeout, at_once=AT_ONCE, on_end=tell)
    done = {id(each): _probed(each, ending) for each, ending in zip(runnable, endings, strict=True)}
    return [done.get(id(each), each) for each in wanted]


# --- in the other process ---------------------------------------------------------------------------------------


def probe_here(function: str) -> dict[str, Any]:
    """Call a probe in this process, and look at which copies of UCX that has loaded."""
    import pkgutil

    report = pkgutil.resolve_name(function)()
    failure = _misshapen(report)
    return {"report": None if failure else report, "failure": failure, "ucx_copies": loaded_copies()}


def import_here(*modules: str) -> dict[str, Any]:
    """Import a runtime's libraries, since it declares no probe, in the shape of a ``ProbeReport``."""
    import importlib

    for module in modules:
        importlib.import_module(module)
    report = {"usable": True, "library": ", ".join(modules), "transports": [], "problems": []}
    return {"report": report, "failure": None, "ucx_copies": loaded_copies()}


# --- what came of it --------------------------------------------------------------------------------------------


def probe_findings(probed: Iterable[Probed], deployment: Deployment, runtime: str | None = None) -> Iterator[Finding]:
    """Say what the probes brought.

    Args:
        probed: from ``run_probes``.
        deployment: whose backend must work; another one that does not is a warning.
        runtime: the plan's, which must work as well.
    """
    for each in probed:
        needed = each.declared.name in (deployment.backend, runtime)
        bad = Severity.ERROR if needed or deployment.backend is None else Severity.WARNING
        if each.declared.missing:
            yield _missing(each, Severity.ERROR if each.asked_for else Severity.INFO)
        elif each.report is None:
            yield _broken(each, bad)
        else:
            yield from _reported(each, each.report, bad)
        if len(each.ucx_copies) > 1:
            yield _two_copies(each)


def _is_wanted(made: Declared, only: str | None) -> bool:
    if only is not None:
        return made.kind == "backend" and made.name == only
    return made.kind == "backend" or (made.kind == "runtime" and bool(made.requires) and not made.missing)


def _call(made: Declared) -> Call:
    if made.kind == "backend":
        return Call(f"{__name__}:probe_here", (made.probe,))
    return Call(f"{__name__}:import_here", tuple(name for name in made.requires if ":" not in name))


def _probed(each: Probed, ending: Ending) -> Probed:
    known: Mapping[str, Any] = {"output": ending.output, "seconds": round(ending.seconds, 3)}
    if ending.failure is not None:
        return replace(each, failure=ending.failure, **known)
    answer = {**ending.value, "ucx_copies": tuple(ending.value["ucx_copies"])}
    return replace(each, **answer, **known)


def _misshapen(value: Any) -> str | None:
    """Say why an answer is no ``ProbeReport``; None where it is one."""
    if not isinstance(value, Mapping):
        return f"answered {value!r:.80}, and a ProbeReport is a mapping"
    for key, kind in _SHAPE.items():
        if not isinstance(value.get(key), kind):
            return f"answered no ProbeReport: {key!r} is {value.get(key)!r:.80}"
    problems: Sequence[Any] = value["problems"]
    if not all(isinstance(each, Mapping) and isinstance(each.get("what"), str) for each in problems):
        return f"answered no ProbeReport: a problem lacks its 'what' in {problems!r:.80}"
    return None


def _missing(each: Probed, severity: Severity) -> Finding:
    what = f"is not available: {' and '.join(each.declared.missing)} not installed"
    return _about(each, severity, what, fix=each.declared.install)


def _broken(each: Probed, severity: Severity) -> Finding:
    what = f"its probe {each.failure}" if each.declared.kind == "backend" else f"its library {each.failure}"
    said = f"the last that it printed: {each.output[-1]}" if each.output else ""
    by, name = each.record.printed_distribution, each.record.name
    fix = f"tell the author of {by}; until then: kvferry plugins disable {name}"
    if each.record.origin is Origin.INJECTED:
        fix = f"mend {name}, or leave its -p out"
    if each.declared.kind == "runtime":
        fix = f"install it again: {each.declared.install}"
    return _about(each, severity, what, cause=said, fix=fix)


def _two_copies(each: Probed) -> Finding:
    return _about(
        each,
        Severity.WARNING,
        f"loads {len(each.ucx_copies)} copies of UCX into one process: {', '.join(each.ucx_copies)}",
        cause="each has its own memory hooks: such a process crashes when it ends, if not before",
        fix="unset LD_PRELOAD and LD_LIBRARY_PATH, and uninstall what brings the one that is not needed",
    )


def _reported(each: Probed, report: Mapping[str, Any], bad: Severity) -> Iterator[Finding]:
    library = report["library"] or "no library"
    problems = [(str(problem["what"]), str(problem.get("fix") or "")) for problem in report["problems"]]
    if not report["usable"]:
        (what, fix), *causes = problems or [(f"does not work here, with {library}; its probe does not say why", "")]
        cause = "; ".join(f"{what} ({fix})" if fix else what for what, fix in causes)
        yield _about(each, bad, what, cause=cause, fix=fix)
        return
    means = f": {', '.join(map(str, report['transports']))}" if report["transports"] else ""
    yield _about(each, Severity.OK, f"works, with {library}{means}")
    for what, fix in problems:
        yield _about(each, Severity.WARNING, what, fix=fix)


def _about(each: Probed, severity: Severity, what: str, *, cause: str = "", fix: str = "") -> Finding:
    return Finding(
        Area.BACKENDS,
        severity,
        each.declared.name if each.declared.kind == "backend" else f"runtime {each.declared.name}",
        what,
        cause,
        fix,
        plugin=each.record.name,
        distribution=each.record.printed_distribution,
    )
