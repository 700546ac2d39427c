"""Guessing which name was meant."""

from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that ``name`` was probably meant to be, or None.

    Of equally near names the first in alphabetical order wins.
    """
    import difflib

    ordered = sorted(names)
    folded: dict[str, str] = {}
    for candidate in ordered:
        folded.setdefault(candidate.lower(), candidate)
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    if close:
        return folded[close[0]]
    words = [candidate for candidate in ordered if len(name) > 2 and name.lower() in candidate.lower().split("_")]
    return words[0] if words else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` or, where nothing is near, the empty string."""
    guess = nearest(name, names)
    return f"; did you mean {guess!r}?" if guess else ""
