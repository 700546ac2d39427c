"""Guesses which name was meant."""

from collections.abc import Iterable

LISTED = 30
"""How many names a message holds at most."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest right name, or list them all."""
    from difflib import get_close_matches

    names = tuple(known)
    match = get_close_matches(name, names, n=1)
    if match:
        return f"did you mean {match[0]!r}?"
    if not names:
        return "there is none"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"there are {', '.join(names[:LISTED])}{more}"
