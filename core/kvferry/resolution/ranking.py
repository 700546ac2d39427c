"""Who wins: the preferred plugin, then injected over external over built-in; equals that disagree are a conflict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvferry.registry.answers import Answer, Rank
from kvferry.registry.quoting import quote
from kvferry_plugins.errors import PluginConflictError
from kvferry_plugins.types import Candidate, Source

T = TypeVar("T")

_RANK_NAMES = {Rank.BUILTIN: "built-in", Rank.EXTERNAL: "external", Rank.INJECTED: "injected"}


@dataclass(frozen=True, slots=True)
class Ranked(Generic[T]):
    """The answer that counts, and those that do not."""

    winner: Answer[T]
    losers: tuple[Answer[T], ...]
    preferred: bool
    """Whether ``plugins.prefer`` decided."""

    def why_lost(self, loser: Answer[T]) -> str:
        """Say why an answer did not count."""
        if self.preferred:
            return f"plugins.prefer names {self.winner.plugin}"
        if loser.rank == self.winner.rank:
            return f"agrees with {self.winner.plugin}"
        return f"{_RANK_NAMES[loser.rank]}, and {self.winner.plugin} is {_RANK_NAMES[self.winner.rank]}"

    def candidates(self, source: Source = "model") -> tuple[Candidate, ...]:
        """Return the answers that lost, as a decision records them."""
        return tuple(Candidate(loser.value, source, loser.plugin, self.why_lost(loser)) for loser in self.losers)


def who(answer: Answer[Any]) -> str:
    """Name a plugin and its distribution: ``acme (acme-kvferry 1.0)``."""
    return f"{answer.plugin} ({answer.distribution.strip('()')})"


def rank_opinions(
    answers: Sequence[Answer[T]], *, subject: str, question: str, prefer: Mapping[str, str]
) -> Ranked[T] | None:
    """Return the opinion that counts; plugins of one rank that agree are one answer.

    Args:
        answers: sorted by plugin.
        subject: the key under which ``plugins.prefer`` may settle it, such as an architecture.
        question: what was asked, for the error.
        prefer: ``plugins.prefer``.

    Raises:
        PluginConflictError: the winning rank disagrees.
    """
    top, preferred = _top(answers, prefer.get(subject))
    if any(answer.value != top[0].value for answer in top):
        raise _conflict(top, subject, question)
    return _ranked(answers, top, preferred)


def rank_providers(
    answers: Sequence[Answer[T]], *, subject: str, question: str, prefer: Mapping[str, str]
) -> Ranked[T] | None:
    """Return the declaration that counts; ``build`` asks one plugin, so two of one rank always conflict.

    Raises:
        PluginConflictError: several of the winning rank declare it.
    """
    top, preferred = _top(answers, prefer.get(subject))
    if len(top) > 1:
        raise _conflict(top, subject, question)
    return _ranked(answers, top, preferred)


def _top(answers: Sequence[Answer[T]], preferred: str | None) -> tuple[list[Answer[T]], bool]:
    chosen = [answer for answer in answers if answer.plugin == preferred]
    if chosen:
        return chosen, True
    best = max((answer.rank for answer in answers), default=None)
    return [answer for answer in answers if answer.rank == best], False


def _ranked(answers: Sequence[Answer[T]], top: Sequence[Answer[T]], preferred: bool) -> Ranked[T] | None:
    if not top:
        return None
    return Ranked(top[0], tuple(answer for answer in answers if answer is not top[0]), preferred)


def _conflict(top: Sequence[Answer[T]], subject: str, question: str) -> PluginConflictError:
    claims = "; ".join(f"{who(answer)} says {quote(answer.value)}" for answer in top)
    return PluginConflictError(
        f"plugins of one rank disagree about {question}: {claims}; settle it with  "
        f"plugins: {{prefer: {{{subject}: {top[0].plugin}}}}}  or leave one out with -p no:{top[-1].plugin}",
        plugins={answer.plugin for answer in top},
    )
