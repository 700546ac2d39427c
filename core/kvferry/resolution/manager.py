"""Step 4: which KV-cache manager, and the plugin that provides it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.checkpoint import ModelSpec
from kvferry.config import EngineArgs
from kvferry.registry.answers import Answer
from kvferry.registry.door import Registry
from kvferry.resolution.backend import BackendChoice
from kvferry.resolution.defaults import not_asked
from kvferry.resolution.ranking import Ranked, rank_opinions, rank_providers
from kvferry.resolution.runtime import RuntimeChoice
from kvferry.resolution.shape import cannot_hold, known_geometry
from kvferry.resolution.vocabulary import MANAGER, MANAGER_NAMES
from kvferry_plugins.errors import ConfigError
from kvferry_plugins.types import Candidate, Decision, ManagerKind


@dataclass(frozen=True, slots=True)
class ManagerChoice:
    """What step 4 decided."""

    decision: Decision
    name: str
    provider: Answer[ManagerKind]
    log: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ManagerQuestion:
    """All that step 4 looks at."""

    args: EngineArgs
    model: ModelSpec | None
    architecture: str | None
    """The *execution* architecture."""
    wishes: Sequence[Answer[bool]]
    registry: Registry
    prefer: Mapping[str, str]
    backend: BackendChoice | None
    runtime: RuntimeChoice | None
    """None where that step failed: then nothing is said about what the transceiver can drive."""


def choose_manager(question: ManagerQuestion) -> ManagerChoice:
    """Decide the manager.

    Raises:
        ConfigError: the transceiver cannot drive it, it has no place for a layer, or no active plugin provides it.
        PluginConflictError: plugins of one rank disagree.
    """
    configured = question.args.kv_cache_config.use_kv_cache_manager_v2
    decision = _automatic(question) if configured == "auto" else _explicit(question, configured)
    decision = _drivable(question, decision)
    name = MANAGER_NAMES[decision.value]
    log: tuple[str, ...] = ()
    if configured == "auto":
        model = question.architecture or "unknown model"
        log = (f"Resolved use_kv_cache_manager_v2='auto' to {decision.value} for {model}.",)
    provider = _provider(question, name)
    _require_place(question, provider.value)
    return ManagerChoice(decision, name, provider, log)


def _require_place(question: ManagerQuestion, kind: ManagerKind) -> None:
    """Refuse a manager that has no place for one of the model's layers."""
    reason = cannot_hold(kind, known_geometry(question.model))
    if reason is not None:
        raise ConfigError(
            f"manager {kind.name} cannot serve {question.architecture or 'this model'}: {reason}; "
            f"set {MANAGER} to true",
            setting=MANAGER,
        )


def _explicit(question: ManagerQuestion, configured: bool) -> Decision:
    lost = tuple(Candidate(wish.value, "model", wish.plugin, "the user wrote this setting") for wish in question.wishes)
    origin = question.args.origin
    return Decision(MANAGER, configured, configured, "user", origin, "set in the configuration", lost)


def _automatic(question: ManagerQuestion) -> Decision:
    ranked = _wish(question)
    if ranked is not None:
        winner = ranked.winner
        reason = f"default of {question.architecture}"
        return Decision(MANAGER, "auto", winner.value, "model", winner.plugin, reason, ranked.candidates())
    silence = not_asked(question.args, question.model, question.architecture)
    lost = (Candidate(None, "model", None, f"not asked: {silence}"),) if silence else ()
    reason = f"falls back to V1: {silence or f'no plugin has a wish for {question.architecture}'}"
    return Decision(MANAGER, "auto", False, "fallback", None, reason, lost)


def _wish(question: ManagerQuestion) -> Ranked[bool] | None:
    if question.architecture is None:
        return None
    subject = f"the KV-cache manager of {question.architecture}"
    return rank_opinions(question.wishes, subject=question.architecture, question=subject, prefer=question.prefer)


def _drivable(question: ManagerQuestion, decision: Decision) -> Decision:
    """Demote an ``auto`` V2 that the transceiver cannot drive; refuse what the user wrote, and a V1."""
    name = MANAGER_NAMES[decision.value]
    obstacle = _obstacle(question, name)
    if obstacle is None:
        return decision
    if decision.source == "user" or decision.value is False:
        raise ConfigError(
            f"use_kv_cache_manager_v2 {str(decision.value).lower()} cannot be had: {obstacle}; "
            f"set {MANAGER} to {str(not decision.value).lower()}, or choose another backend or runtime",
            setting=MANAGER,
        )
    refused = Candidate(decision.value, decision.source, decision.by, obstacle)
    demoted = replace(
        decision,
        value=False,
        source="fallback",
        by=None,
        reason=f"falls back to V1: {obstacle}",
        candidates=(refused, *decision.candidates),
    )
    return _drivable(question, demoted)


def _obstacle(question: ManagerQuestion, name: str) -> str | None:
    """Say what of the transceiver cannot drive the manager; None where the transceiver is off, or can."""
    backend, runtime = question.backend, question.runtime
    if backend is None or runtime is None or backend.backend is None or runtime.provider is None:
        return None
    support = backend.backend.value.runtimes.get(runtime.provider.value.name)
    if support is not None and support.managers is not None and name not in support.managers:
        return f"backend {backend.backend.value.name} under {runtime.name} cannot drive manager {name}"
    if runtime.provider.value.managers is not None and name not in runtime.provider.value.managers:
        return f"runtime {runtime.name} cannot drive manager {name}"
    return None


def _provider(question: ManagerQuestion, name: str) -> Answer[ManagerKind]:
    answers = [answer for answer in question.registry.kv_cache_managers() if answer.value.name == name]
    ranked = rank_providers(answers, subject=name, question=f"the KV-cache manager {name}", prefer=question.prefer)
    if ranked is None:
        inactive = "; ".join(question.registry.inactive()) or "none"
        raise ConfigError(
            f"no active plugin provides the KV-cache manager {name}; plugins that are not active: {inactive}",
            setting=MANAGER,
        )
    return ranked.winner
