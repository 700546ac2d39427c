"""Guesses which name was meant."""

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest right name, or list them all."""
    from difflib import get_close_matches

    names = tuple(known)
    match = get_close_matches(name, names, n=1)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"there are {', '.join(names)}" if names else "there is none"
