"""Step 3: what the transceiver runs on, and the plugin that provides it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.checkpoint import ModelSpec
from kvferry.config import EngineArgs
from kvferry.registry.answers import Answer
from kvferry.registry.door import Registry
from kvferry.registry.quoting import quote
from kvferry.resolution.backend import BackendChoice, is_enabled
from kvferry.resolution.defaults import not_asked
from kvferry.resolution.ranking import Ranked, rank_opinions, rank_providers, who
from kvferry.resolution.vocabulary import FALLBACK_RUNTIME, PIPELINING, RUNTIME, RUNTIMES, TIMEOUT
from kvferry_plugins.errors import ConfigError, HookError, KvferryError, ResolutionError
from kvferry_plugins.types import Candidate, Decision, TransceiverRuntime


@dataclass(frozen=True, slots=True)
class RuntimeChoice:
    """What step 3 decided; ``name`` and ``provider`` are None where the transceiver is off."""

    decision: Decision
    name: str | None = None
    provider: Answer[TransceiverRuntime] | None = None
    log: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a runtime cannot serve this configuration."""

    setting: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class RuntimeQuestion:
    """All that step 3 looks at."""

    args: EngineArgs
    model: ModelSpec | None
    registry: Registry
    prefer: Mapping[str, str]
    backend: BackendChoice | None
    """None where step 1 failed: then nothing is said about what the backend can do."""

    @property
    def architecture(self) -> str | None:
        """The *checkpoint's* architecture."""
        return self.model.architecture if self.model else None


def choose_runtime(question: RuntimeQuestion) -> RuntimeChoice:
    """Decide the runtime.

    Raises:
        ConfigError: what the user wrote, or the fallback, is impossible; several reasons as a ResolutionError.
        HookError: a model plugin's preference is no runtime.
        PluginConflictError: plugins of one rank disagree.
    """
    if not is_enabled(question.args):
        return RuntimeChoice(_untouched(question.args))
    section = question.args.cache_transceiver_config
    assert section is not None
    if section.transceiver_runtime == "auto":
        return _automatic(question)
    return _explicit(question, section.transceiver_runtime)


def _untouched(args: EngineArgs) -> Decision:
    section = args.cache_transceiver_config
    configured = section.transceiver_runtime if section else "auto"
    written = section is not None and "transceiver_runtime" in section.model_fields_set
    return Decision(
        RUNTIME,
        requested=configured,
        value=configured,
        source="user" if written else "default",
        by=args.origin if written else None,
        reason="the transceiver is off",
        candidates=_unasked("the transceiver is off"),
    )


def _unasked(why: str) -> tuple[Candidate, ...]:
    return (Candidate(None, "model", None, f"not asked: {why}"),)


def _explicit(question: RuntimeQuestion, configured: str | None) -> RuntimeChoice:
    runtime = configured or FALLBACK_RUNTIME
    reason = "set in the configuration" if configured else f"set in the configuration: null means {FALLBACK_RUNTIME}"
    obstacles = _obstacles(question, runtime)
    if obstacles:
        _raise(obstacles, f"transceiver_runtime {configured!r} cannot be had")
    lost = _unasked("the configuration names the runtime")
    decision = Decision(RUNTIME, configured, configured, "user", question.args.origin, reason, lost)
    return RuntimeChoice(decision, runtime, _provider(question, runtime))


def _automatic(question: RuntimeQuestion) -> RuntimeChoice:
    silence = not_asked(question.args, question.model, question.architecture)
    preference = None if silence else _preference(question)
    obstacles = _obstacles(question, preference.winner.value) if preference else ()
    if preference and not obstacles:
        winner = preference.winner
        reason = f"preference of {question.architecture}"
        decision = Decision(RUNTIME, "auto", winner.value, "model", winner.plugin, reason, preference.candidates())
        return RuntimeChoice(decision, winner.value, _provider(question, winner.value), _log(question, decision))
    return _fallen_back(question, preference, silence, obstacles)


def _fallen_back(
    question: RuntimeQuestion, preference: Ranked[str] | None, silence: str | None, obstacles: Sequence[Obstacle]
) -> RuntimeChoice:
    runtime = _fallback(question)
    why = (
        "; ".join(obstacle.reason for obstacle in obstacles)
        or silence
        or (f"no plugin prefers a runtime for {question.architecture}")
    )
    impossible = _obstacles(question, runtime)
    if impossible:
        _raise(impossible, f"transceiver_runtime 'auto' falls back to {runtime} ({why}), which cannot be had")
    lost = _unasked(silence) if silence else _refused(preference, why)
    value = None if runtime == FALLBACK_RUNTIME else runtime
    decision = Decision(RUNTIME, "auto", value, "fallback", None, f"{_falls_back(question, runtime)}: {why}", lost)
    return RuntimeChoice(decision, runtime, _provider(question, runtime), _log(question, decision))


def _falls_back(question: RuntimeQuestion, runtime: str) -> str:
    backend = question.backend.backend if question.backend else None
    if backend is None or runtime == FALLBACK_RUNTIME:
        return f"falls back to {runtime}"
    return f"falls back to {runtime}, the only runtime of {backend.value.name}"


def _refused(preference: Ranked[str] | None, why: str) -> tuple[Candidate, ...]:
    if preference is None:
        return ()
    winner = preference.winner
    return (Candidate(winner.value, "model", winner.plugin, why), *preference.candidates())


def _log(question: RuntimeQuestion, decision: Decision) -> tuple[str, ...]:
    line = f"Resolved transceiver_runtime='auto' to {decision.value!r} for {question.architecture or 'unknown model'}."
    return (f"{line} It {decision.reason}." if decision.source == "fallback" else line,)


def _preference(question: RuntimeQuestion) -> Ranked[str] | None:
    architecture = question.architecture
    assert architecture is not None
    config = question.model.pretrained_config if question.model else None
    answers = question.registry.preferred_transceiver_runtime(architecture, config)
    problems: list[KvferryError] = [_strange_preference(answer) for answer in answers if answer.value not in RUNTIMES]
    if problems:
        raise problems[0] if len(problems) == 1 else ResolutionError(problems)
    subject = f"the runtime that {architecture} prefers"
    return rank_opinions(answers, subject=architecture, question=subject, prefer=question.prefer)


def _strange_preference(answer: Answer[Any]) -> HookError:
    return HookError(
        f"the preferred_transceiver_runtime of plugin {who(answer)} answered "
        f"{quote(answer.value)}; it may answer {', '.join(map(repr, RUNTIMES))} or None; "
        f"mend the plugin, or leave it out with -p no:{answer.plugin}",
        hook="preferred_transceiver_runtime",
        plugin=answer.plugin,
        distribution=answer.distribution,
    )


def _fallback(question: RuntimeQuestion) -> str:
    """Return the named fallback, or the one runtime of a backend that declares no other."""
    backend = question.backend.backend if question.backend else None
    if backend is None or FALLBACK_RUNTIME in backend.value.runtimes or len(backend.value.runtimes) > 1:
        return FALLBACK_RUNTIME
    return next(iter(backend.value.runtimes))


def _obstacles(question: RuntimeQuestion, runtime: str) -> tuple[Obstacle, ...]:
    found = (_backend_obstacle(question, runtime), _timeout_obstacle(question, runtime))
    return tuple(obstacle for obstacle in (*found, _provider_obstacle(question, runtime)) if obstacle)


def _backend_obstacle(question: RuntimeQuestion, runtime: str) -> Obstacle | None:
    choice = question.backend
    if choice is None or choice.backend is None or runtime in choice.backend.value.runtimes:
        return None
    declared = ", ".join(sorted(choice.backend.value.runtimes))
    able = sorted(name for name, runtimes in (choice.others or {}).items() if runtime in runtimes)
    return Obstacle(
        RUNTIME,
        f"backend {choice.backend.value.name} does not run under {runtime} "
        f"({', '.join(able) or 'no active backend'} {'do' if len(able) > 1 else 'does'})",
        f"set {RUNTIME} to {declared} or auto, or choose another backend",
    )


def _timeout_obstacle(question: RuntimeQuestion, runtime: str) -> Obstacle | None:
    section, choice = question.args.cache_transceiver_config, question.backend
    if choice is None or choice.backend is None or section is None or section.kv_transfer_timeout_ms is not None:
        return None
    support = choice.backend.value.runtimes.get(runtime)
    if support is None or not support.needs_finite_timeout:
        return None
    return Obstacle(
        TIMEOUT,
        f"{runtime} on {choice.backend.value.name} needs a finite kv_transfer_timeout_ms, which is null",
        f"set {TIMEOUT} to a number of milliseconds, or use another runtime",
    )


def _provider_obstacle(question: RuntimeQuestion, runtime: str) -> Obstacle | None:
    """Whether a plugin implements the runtime, and does what the configuration asks of it."""
    provider = _provider(question, runtime)
    if provider is None:
        inactive = "; ".join(question.registry.inactive()) or "none"
        reason = f"no active plugin provides the runtime {runtime}; plugins that are not active: {inactive}"
        return Obstacle(RUNTIME, reason, "enable one, or use another runtime")
    section = question.args.cache_transceiver_config
    if section is not None and section.enable_pipelined_transfer and not provider.value.pipelining:
        able = sorted(
            {answer.value.name for answer in question.registry.transceiver_runtimes() if answer.value.pipelining}
        )
        reason = f"{runtime} does not pipeline transfers, and enable_pipelined_transfer is true"
        return Obstacle(PIPELINING, reason, f"set it to false, or {RUNTIME} to {' or '.join(able) or 'one that does'}")
    return None


def _provider(question: RuntimeQuestion, runtime: str) -> Answer[TransceiverRuntime] | None:
    answers = [answer for answer in question.registry.transceiver_runtimes() if answer.value.name == runtime]
    ranked = rank_providers(answers, subject=runtime, question=f"the runtime {runtime}", prefer=question.prefer)
    return ranked.winner if ranked else None


def _raise(obstacles: Sequence[Obstacle], what: str) -> None:
    errors = [ConfigError(f"{what}: {one.reason}; {one.remedy}", setting=one.setting) for one in obstacles]
    raise errors[0] if len(errors) == 1 else ResolutionError(errors)
