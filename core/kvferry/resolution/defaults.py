"""Step 2: what the model's plugins say where the user said nothing, ranked leaf key by leaf key."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from kvferry.checkpoint import ModelSpec
from kvferry.config import EngineArgs
from kvferry.config.nested import get_leaf, leaves, thaw
from kvferry.config.problems import find_problems
from kvferry.registry.answers import Answer
from kvferry.registry.door import Registry
from kvferry.registry.quoting import cut, quote
from kvferry.resolution.ranking import Ranked, rank_opinions, who
from kvferry.resolution.vocabulary import BACKEND, MANAGER, RUNTIME, TRANSCEIVER
from kvferry_plugins.errors import HookError, KvferryError, ResolutionError
from kvferry_plugins.types import Candidate, Decision

NOT_FOR_MODELS: Final = {
    TRANSCEIVER: "only the user turns disaggregation on; a wish for a runtime belongs in preferred_transceiver_runtime",
    "model_loader": "the loader decides whether models are asked at all",
    "peers": "whom a worker trusts is the user's business",
    "plugins": "plugins were chosen before models were asked",
}
"""Top-level keys that a model's defaults may not hold → why."""

_PROBLEMS_TOLD: Final = 10
"""Of one plugin's defaults; they may be any number."""
_DECIDED_ELSEWHERE: Final = frozenset({BACKEND, RUNTIME, MANAGER})


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What step 2 decided."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key → the model's value, where it counts."""
    decisions: tuple[Decision, ...] = ()
    manager_wishes: tuple[Answer[bool], ...] = ()
    """True or false for ``use_kv_cache_manager_v2``; ``auto`` is no wish."""


def not_asked(args: EngineArgs, model: ModelSpec | None, architecture: str | None) -> str | None:
    """Say why no model hook is called, or None where they are."""
    if args.model_loader == "external":
        return "model_loader is 'external'"
    if architecture is not None:
        return None
    return "no model given" if model is None else "the checkpoint names no architecture"


def collect_defaults(
    args: EngineArgs,
    model: ModelSpec | None,
    architecture: str | None,
    *,
    registry: Registry,
    prefer: Mapping[str, str],
) -> ModelDefaults:
    """Ask the plugins for the *execution* architecture's defaults and rank them.

    Raises:
        HookError: a plugin answered outside the configuration's schema; several at once as a ResolutionError.
        PluginConflictError: plugins of one rank disagree about a key.
    """
    written = args.written()
    user = dict(leaves(written))
    if architecture is None or not_asked(args, model, architecture):
        return ModelDefaults(decisions=tuple(_user_decisions(args, user)))
    answers = registry.model_defaults(architecture, model.pretrained_config if model else None, written)
    by_leaf = _by_leaf(answers)
    wishes = tuple(answer for answer in by_leaf.pop(MANAGER, []) if isinstance(answer.value, bool))
    open_leaves = {leaf: claims for leaf, claims in by_leaf.items() if leaf not in user}
    winners = _rank_all(open_leaves, architecture, prefer)
    schema_defaults = args.model_dump()
    decisions = (
        *_user_decisions(args, user, by_leaf),
        *(_model_decision(leaf, get_leaf(schema_defaults, leaf), winners[leaf], architecture) for leaf in winners),
    )
    return ModelDefaults({leaf: ranked.winner.value for leaf, ranked in winners.items()}, decisions, wishes)


def _by_leaf(answers: Sequence[Answer[Any]]) -> dict[str, list[Answer[Any]]]:
    """Sort valid answers by dotted key; every invalid one is reported."""
    by_leaf: dict[str, list[Answer[Any]]] = defaultdict(list)
    problems: list[KvferryError] = []
    for answer in answers:
        try:
            found = _validated(answer)
        except ResolutionError as error:
            problems.extend(error.blockers)
            continue
        for leaf, value in found.items():
            by_leaf[leaf].append(Answer(answer.plugin, answer.distribution, answer.rank, value))
    _raise_all(problems)
    return dict(sorted(by_leaf.items()))


def _validated(answer: Answer[Any]) -> dict[str, Any]:
    """Return one plugin's defaults by dotted key; the schema is the user's own. Raises ResolutionError."""
    if not isinstance(answer.value, Mapping):
        raise ResolutionError([_hook_error(answer, f"should be a mapping or None, but are {quote(answer.value)}")])
    problems: list[KvferryError] = [_hook_error(answer, what) for key in answer.value if (what := _refusal(key))]
    allowed = {key: value for key, value in answer.value.items() if not _refusal(key)}
    try:
        defaults = EngineArgs.model_validate(thaw(allowed))
    except ValidationError as error:
        problems += [_hook_error(answer, f"are wrong: {text}") for _, text in find_problems(error)]
    if len(problems) > _PROBLEMS_TOLD:
        more = _hook_error(answer, f"have {len(problems) - _PROBLEMS_TOLD} more problems")
        raise ResolutionError([*problems[:_PROBLEMS_TOLD], more])
    if problems:
        raise ResolutionError(problems)
    return dict(leaves(defaults.written()))


def _refusal(key: object) -> str | None:
    """Say why a top-level key may not be there; the schema finds the unknown ones."""
    top, dot, _ = str(key).partition(".")
    if top in NOT_FOR_MODELS:
        return f"may not hold {quote(key)}: {NOT_FOR_MODELS[top]}"
    return f"should nest sections instead of the dotted key {quote(key)}" if dot else None


def _hook_error(answer: Answer[Any], what: str) -> HookError:
    return HookError(
        f"the model_defaults of plugin {who(answer)} {cut(what)}; "
        f"mend the plugin, or leave it out with -p no:{answer.plugin}",
        hook="model_defaults",
        plugin=answer.plugin,
        distribution=answer.distribution,
    )


def _rank_all(
    by_leaf: Mapping[str, Sequence[Answer[Any]]], architecture: str, prefer: Mapping[str, str]
) -> dict[str, Ranked[Any]]:
    winners: dict[str, Ranked[Any]] = {}
    problems: list[KvferryError] = []
    for leaf, claims in by_leaf.items():
        try:
            question = f"the default of {leaf} for {architecture}"
            ranked = rank_opinions(claims, subject=architecture, question=question, prefer=prefer)
        except KvferryError as error:
            problems.append(error)
        else:
            assert ranked is not None
            winners[leaf] = ranked
    _raise_all(problems)
    return winners


def _user_decisions(
    args: EngineArgs, user: Mapping[str, Any], by_leaf: Mapping[str, Sequence[Answer[Any]]] | None = None
) -> Iterator[Decision]:
    for leaf, value in user.items():
        if leaf in _DECIDED_ELSEWHERE or leaf == TRANSCEIVER or leaf.partition(".")[0] in ("peers", "plugins"):
            continue
        lost = tuple(
            Candidate(claim.value, "model", claim.plugin, "the user wrote this setting")
            for claim in (by_leaf or {}).get(leaf, ())
        )
        yield Decision(leaf, value, value, "user", args.origin, "set in the configuration", lost)


def _model_decision(leaf: str, schema_default: Any, ranked: Ranked[Any], architecture: str) -> Decision:
    lost = (*ranked.candidates(), Candidate(schema_default, "default", None, "the model's default comes first"))
    reason = f"default of {architecture}"
    return Decision(leaf, schema_default, ranked.winner.value, "model", ranked.winner.plugin, reason, lost)


def _raise_all(problems: list[KvferryError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise ResolutionError(problems)
