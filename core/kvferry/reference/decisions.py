"""``docs/reference/decisions.md``: what the resolver answers, asked of it while the page is written."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from kvferry.checkpoint import ModelSpec
from kvferry.dispatcher import resolve
from kvferry.reference.markdown import code, page, table, yaml_value
from kvferry.registry.answers import Answer, Rank
from kvferry.registry.door import Registry
from kvferry.resolution.ranking import rank_opinions
from kvferry.resolution.selectors import SELECTORS
from kvferry.resolution.vocabulary import ASK_ENVIRONMENT, BACKEND, MANAGER, RUNTIME, RUNTIMES
from kvferry.testing import isolated_registry
from kvferry_plugins.errors import KvferryError, PluginConflictError, ResolutionError
from kvferry_plugins.testing import FakeModelPlugin
from kvferry_plugins.types import Decision, Plan

ARCHITECTURE: Final = "AcmeForCausalLM"
ANY: Final = "any"

INTRODUCTION: Final = """\
`kvferry explain` and a worker ask one function, `resolve`, and so did whoever wrote this page: each row below is
its answer to that combination, with a model plugin `acme` that prefers or defaults what the row says. The steps,
their order, and what beats what are in [From configuration to plan](../resolution.md)."""

BACKEND_TEXT: Final = """\
`cache_transceiver_config.backend`. null, or no section, is off, and then the environment is not read."""

RUNTIME_TEXT: Final = """\
`cache_transceiver_config.transceiver_runtime`. *Preferred* is what the model's plugin answers to
`preferred_transceiver_runtime`, *time-out* is `kv_transfer_timeout_ms`."""

ASKED_TEXT: Final = """\
`auto` on `NIXL`, with `acme` preferring `PYTHON` for `AcmeForCausalLM` alone."""

MANAGER_TEXT: Final = """\
`kv_cache_config.use_kv_cache_manager_v2`. *Default* is what the model's plugin answers to `model_defaults`."""

RANK_TEXT: Final = """\
What two plugins that answer for one architecture come to. *prefer* is `plugins: {prefer: {AcmeForCausalLM: …}}`;
what is injected was asked for with `-p`, or by a test."""

Row = tuple[str, ...]


def decisions_page() -> str:
    """Write the page."""
    return page(
        "How a decision is made, as tables",
        "core/kvferry/resolution",
        INTRODUCTION,
        f"## The backend\n\n{BACKEND_TEXT}\n\n{_backends()}",
        f"## The runtime\n\n{RUNTIME_TEXT}",
        *_runtimes(),
        f"### Which models are asked\n\n{ASKED_TEXT}\n\n{_asked()}",
        f"## The KV-cache manager\n\n{MANAGER_TEXT}\n\n{_managers()}",
        f"## Plugins that disagree\n\n{RANK_TEXT}\n\n{_ranks()}",
    )


def _ask(
    config: Mapping[str, Any], registry: Registry, environ: Mapping[str, str] | None = None
) -> Plan | KvferryError:
    try:
        return resolve(config, model=ModelSpec(ARCHITECTURE), registry=registry, environ=environ or {})
    except KvferryError as error:
        return error


def _outcome(answer: Plan | KvferryError, setting: str) -> Row:
    """What a setting holds, who decided and why; or the error."""
    if isinstance(answer, KvferryError):
        blockers = answer.blockers if isinstance(answer, ResolutionError) else (answer,)
        return "refused", "–", "; ".join(str(blocker).partition("; ")[0] for blocker in blockers)
    decision = answer.decision(setting)
    return yaml_value(decision.value), _source(decision), decision.reason


def _source(decision: Decision) -> str:
    return f"{decision.source}: {code(decision.by)}" if decision.by else decision.source


# --- the backend ----------------------------------------------------------------------------------------------------


def _backends() -> str:
    registry = isolated_registry()
    first, second = (variable for variable, _ in SELECTORS[:2])
    asked: list[tuple[str | None, dict[str, str]]] = [
        (None, {first: "1"}),
        (ASK_ENVIRONMENT, {}),
        *((ASK_ENVIRONMENT, {variable: "1"}) for variable, _ in SELECTORS),
        (ASK_ENVIRONMENT, {first: "1", second: "1"}),
        (ASK_ENVIRONMENT, {second: "true"}),
        (ASK_ENVIRONMENT, {second: "0"}),
        (SELECTORS[1][1], {first: "1"}),
        ("NONE", {}),
    ]
    rows = [_backend_row(backend, environ, registry) for backend, environ in asked]
    return table(("`backend`", "environment", "effective", "source", "why", "warning"), rows)


def _backend_row(backend: str | None, environ: dict[str, str], registry: Registry) -> Row:
    answer = _ask({"cache_transceiver_config": {"backend": backend}}, registry, environ)
    variables = ", ".join(code(f"{name}={value}") for name, value in environ.items()) or "–"
    warnings = answer.warnings if isinstance(answer, Plan) else ()
    return (yaml_value(backend), variables, *_outcome(answer, BACKEND), "; ".join(warnings) or "–")


# --- the runtime ----------------------------------------------------------------------------------------------------

RUNTIME_HEADINGS: Final = ("requested", "preferred", "time-out", "the setting holds", "runs on", "source", "why")
_REQUESTED: Final = ("auto", *RUNTIMES, None)
_PREFERRED: Final = (None, *RUNTIMES)
_TIMEOUTS: Final = (60_000, None)
_ITSELF: Final = "…"
"""Stands for the backend's name in a table of several."""


def _runtimes() -> list[str]:
    """One table for all backends that answer alike."""
    names = sorted(each.value.name for each in isolated_registry().transfer_backends())
    tables: dict[str, list[str]] = {}
    for name in names:
        text = table(RUNTIME_HEADINGS, _runtime_rows(name)).replace(name, _ITSELF)
        tables.setdefault(text, []).append(name)
    return [
        f"### {_listed(alike)}\n\n{text.replace(_ITSELF, alike[0]) if len(alike) == 1 else text}"
        for text, alike in tables.items()
    ]


def _runtime_rows(backend: str) -> list[Row]:
    registries = {
        wish: isolated_registry(FakeModelPlugin(ARCHITECTURE, runtime=wish, name="acme")) for wish in _PREFERRED
    }
    rows: list[Row] = []
    for requested in _REQUESTED:
        answers = {
            (wish, timeout): _runtime_outcome(backend, requested, timeout, registries[wish])
            for wish in _PREFERRED
            for timeout in _TIMEOUTS
        }
        rows += [(yaml_value(requested), *row) for row in _merged(answers)]
    return rows


def _runtime_outcome(backend: str, requested: str | None, timeout: int | None, registry: Registry) -> Row:
    section = {"backend": backend, "transceiver_runtime": requested, "kv_transfer_timeout_ms": timeout}
    answer = _ask({"cache_transceiver_config": section}, registry)
    runs_on = code(answer.runtime) if isinstance(answer, Plan) else "–"
    value, source, why = _outcome(answer, RUNTIME)
    return value, runs_on, source, why


def _merged(answers: Mapping[tuple[str | None, int | None], Row]) -> Iterable[Row]:
    """Write rows; what makes no difference is ``any``."""
    wish_matters = any(len({answers[wish, timeout] for wish in _PREFERRED}) > 1 for timeout in _TIMEOUTS)
    for wish in _PREFERRED if wish_matters else _PREFERRED[:1]:
        preferred = ("nothing" if wish is None else code(wish)) if wish_matters else ANY
        timeout_matters = answers[wish, _TIMEOUTS[0]] != answers[wish, _TIMEOUTS[1]]
        for timeout in _TIMEOUTS if timeout_matters else _TIMEOUTS[:1]:
            finite = ("null" if timeout is None else "finite") if timeout_matters else ANY
            yield (preferred, finite, *answers[wish, timeout])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _asked() -> str:
    """Resolve what differs in the model alone."""
    registry = isolated_registry(FakeModelPlugin(ARCHITECTURE, runtime="PYTHON", name="acme"))
    external = {"model_loader": "external"}
    asked: list[tuple[str, ModelSpec | None, dict[str, Any], str | None]] = [
        (f"{code(ARCHITECTURE)}", ModelSpec(ARCHITECTURE), {}, None),
        (f"{code(ARCHITECTURE)}, run as `AcmeMtpDraft`", ModelSpec(ARCHITECTURE), {}, "AcmeMtpDraft"),
        ("`AcmeMoeForCausalLM`, a class below it", ModelSpec("AcmeMoeForCausalLM"), {}, None),
        (f"{code(ARCHITECTURE)}, with `model_loader: external`", ModelSpec(ARCHITECTURE), external, None),
        ("a checkpoint that names no architecture", ModelSpec(None), {}, None),
        ("no model", None, {}, None),
    ]
    rows = []
    for shown, model, extra, executed in asked:
        config = {"cache_transceiver_config": {"backend": "NIXL"}, **extra}
        plan = resolve(config, model=model, registry=registry, environ={}, execution_architecture=executed)
        rows.append((shown, code(plan.runtime), *_outcome(plan, RUNTIME)[1:]))
    return table(("model", "runs on", "source", "why"), rows)


# --- the manager ----------------------------------------------------------------------------------------------------


def _managers() -> str:
    rows = []
    for requested in ("auto", True, False):
        for default in (None, True, False, "auto"):
            for loader in ("pytorch", "external"):
                defaults = None if default is None else {"kv_cache_config": {"use_kv_cache_manager_v2": default}}
                registry = isolated_registry(FakeModelPlugin(ARCHITECTURE, defaults=defaults, name="acme"))
                config = {"kv_cache_config": {"use_kv_cache_manager_v2": requested}, "model_loader": loader}
                answer = _ask(config, registry)
                manager = code(answer.manager) if isinstance(answer, Plan) else "–"
                shown = "nothing" if default is None else yaml_value(default)
                rows.append((yaml_value(requested), shown, code(loader), manager, *_outcome(answer, MANAGER)[1:]))
    return table(("requested", "default", "`model_loader`", "manager", "source", "why"), _without_repeats(rows))


def _without_repeats(rows: list[Row]) -> Iterable[Row]:
    """Write rows of one request that all answer alike as one."""
    for requested, found in groupby(rows, key=lambda row: row[0]):
        same = list(found)
        if len({row[3:] for row in same}) == 1:
            yield (requested, ANY, ANY, *same[0][3:])
            continue
        external = [row for row in same if row[2] == code("external")]
        yield from (row for row in same if row not in external)
        yield (requested, ANY, *external[0][2:])


# --- plugins of several ranks ---------------------------------------------------------------------------------------

_RANKS: Final = {Rank.BUILTIN: "built-in", Rank.EXTERNAL: "external", Rank.INJECTED: "injected"}


def _ranks() -> str:
    """Ask the ranking itself: a registry of the three ranks would need installed packages."""
    asked = [
        (("CPP", Rank.BUILTIN), ("PYTHON", Rank.EXTERNAL), None),
        (("CPP", Rank.EXTERNAL), ("PYTHON", Rank.INJECTED), None),
        (("CPP", Rank.EXTERNAL), ("CPP", Rank.EXTERNAL), None),
        (("CPP", Rank.EXTERNAL), ("PYTHON", Rank.EXTERNAL), None),
        (("CPP", Rank.EXTERNAL), ("PYTHON", Rank.EXTERNAL), "acme"),
        (("CPP", Rank.BUILTIN), ("PYTHON", Rank.INJECTED), "acme"),
    ]
    return table(("`acme`", "`zenith`", "prefer", "counts", "the other"), [_rank_row(*each) for each in asked])


def _rank_row(acme: tuple[str, Rank], zenith: tuple[str, Rank], preferred: str | None) -> Row:
    answers = [Answer(name, name, rank, value) for name, (value, rank) in (("acme", acme), ("zenith", zenith))]
    shown = [f"{_RANKS[rank]}: {code(value)}" for value, rank in (acme, zenith)]
    prefer = {ARCHITECTURE: preferred} if preferred else {}
    try:
        ranked = rank_opinions(answers, subject=ARCHITECTURE, question="", prefer=prefer)
    except PluginConflictError as error:
        what = f"a `{type(error).__name__}` names {_listed(error.plugins)}, and the line that settles it"
        return (*shown, preferred or "–", "refused", what)
    assert ranked is not None
    return (*shown, preferred or "–", code(ranked.winner.value), ranked.why_lost(ranked.losers[0]))
