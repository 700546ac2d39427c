"""Step 1: the effective backend, and the plugin that provides it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.config import EngineArgs
from kvferry.config.nearest import did_you_mean
from kvferry.registry.answers import Answer
from kvferry.registry.door import Registry
from kvferry.resolution.ranking import rank_providers, who
from kvferry.resolution.selectors import Selection, selections, selector_warnings
from kvferry.resolution.vocabulary import ASK_ENVIRONMENT, BACKEND, DEFAULT_BACKEND, RUNTIMES, TRANSCEIVER
from kvferry_plugins.errors import ConfigError, HookError
from kvferry_plugins.types import Candidate, Decision, TransferBackend


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What step 1 decided; ``backend`` is None where the transceiver is off."""

    decision: Decision
    backend: Answer[TransferBackend] | None = None
    others: Mapping[str, frozenset[str]] | None = None
    """Every declared backend → the runtimes it declares, for errors and reasons."""
    warnings: tuple[str, ...] = ()


def is_enabled(args: EngineArgs) -> bool:
    """Tell whether the user turned disaggregation on."""
    section = args.cache_transceiver_config
    return section is not None and section.backend is not None


def choose_backend(
    args: EngineArgs, *, registry: Registry, environ: Mapping[str, str], prefer: Mapping[str, str]
) -> BackendChoice:
    """Decide the backend.

    Raises:
        ConfigError: no active plugin declares it.
        PluginConflictError: several plugins of one rank do.
        HookError: a declaration is outside the vocabulary.
    """
    if not is_enabled(args):
        return BackendChoice(_off(args))
    decision, warnings = _decide(args, environ)
    declared = _by_name(registry)
    name = decision.value
    if name not in declared:
        raise _unknown(decision, declared, registry)
    ranked = rank_providers(declared[name], subject=name, question=f"the backend {name}", prefer=prefer)
    assert ranked is not None
    backend = ranked.winner
    if backend.value.deprecated:
        warnings = (*warnings, f"backend {name} is deprecated: {backend.value.deprecated}")
    others = {other: frozenset(answers[0].value.runtimes) for other, answers in declared.items()}
    return BackendChoice(_checked(decision, backend), backend, others, warnings)


def _off(args: EngineArgs) -> Decision:
    section = args.cache_transceiver_config
    written = TRANSCEIVER in args.model_fields_set and (section is None or "backend" in section.model_fields_set)
    reason = "switched off" if written else "nobody turned disaggregation on"
    return Decision(BACKEND, None, None, "user" if written else "default", args.origin if written else None, reason)


def _decide(args: EngineArgs, environ: Mapping[str, str]) -> tuple[Decision, tuple[str, ...]]:
    assert args.cache_transceiver_config is not None
    requested = args.cache_transceiver_config.backend
    selected, warnings = selections(environ), selector_warnings(environ)
    if requested != ASK_ENVIRONMENT:
        losers = _candidates(selected, f"the configuration names {requested!r}")
        return Decision(
            BACKEND, requested, requested, "user", args.origin, "set in the configuration", losers
        ), warnings
    if not selected:
        reason = f"{ASK_ENVIRONMENT}, and no variable selects a backend"
        return Decision(BACKEND, requested, DEFAULT_BACKEND, "default", None, reason), warnings
    first, *rest = selected
    advice = (
        f"{first.variable}=1 decides the backend; better, set {BACKEND}: {first.backend} in the configuration, "
        "which every worker reads alike"
    )
    losers = _candidates(rest, f"{first.variable} comes first")
    reason = f"{ASK_ENVIRONMENT}, and {first.variable} is 1"
    decision = Decision(BACKEND, requested, first.backend, "environment", first.variable, reason, losers)
    return decision, (advice, *warnings)


def _candidates(lost: tuple[Selection, ...] | list[Selection], reason: str) -> tuple[Candidate, ...]:
    return tuple(Candidate(one.backend, "environment", one.variable, reason) for one in lost)


def _by_name(registry: Registry) -> dict[str, list[Answer[TransferBackend]]]:
    declared: dict[str, list[Answer[TransferBackend]]] = defaultdict(list)
    for answer in registry.transfer_backends():
        declared[answer.value.name].append(answer)
    return dict(declared)


def _checked(decision: Decision, backend: Answer[TransferBackend]) -> Decision:
    """Refuse a declaration whose runtimes nobody could ask for."""
    strange = sorted(set(backend.value.runtimes) - set(RUNTIMES))
    if strange or not backend.value.runtimes:
        what = f"the runtime {strange[0]!r}" if strange else "no runtime"
        raise HookError(
            f"plugin {who(backend)} declares {what} for the backend "
            f"{backend.value.name}; the runtimes are {', '.join(RUNTIMES)}",
            hook="transfer_backends",
            plugin=backend.plugin,
            distribution=backend.distribution,
        )
    return decision


def _unknown(decision: Decision, declared: Mapping[str, object], registry: Registry) -> ConfigError:
    chosen_by = f" (selected by {decision.by}=1)" if decision.source == "environment" else ""
    inactive = registry.inactive()
    return ConfigError(
        f"{BACKEND} {decision.value!r}{chosen_by} is declared by no active plugin"
        f"{did_you_mean(decision.value, declared)}; "
        f"declared: {', '.join(sorted(declared)) or 'none'}; "
        f"plugins that are not active: {'; '.join(inactive) or 'none'}",
        setting=BACKEND,
    )
