"""The environment variables that select a backend where the configuration says ``DEFAULT``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvferry.config.nearest import nearest

SELECTORS: Final = (
    ("TRTLLM_USE_NIXL_KVCACHE", "NIXL"),
    ("TRTLLM_USE_UCX_KVCACHE", "UCX"),
    ("TRTLLM_USE_MOONCAKE_KVCACHE", "MOONCAKE"),
    ("TRTLLM_USE_MPI_KVCACHE", "MPI"),
)
"""(variable, backend) in the order in which they are looked at: the only such table. Order as TensorRT-LLM's."""

_ON: Final = "1"
_OFF: Final = frozenset({"", "0", "false", "no", "off"})
_LOOKS_LIKE_ONE: Final = re.compile(r"TRT_?LLM_USE_\w+_KV_?CACHE\w*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Selection:
    """One variable that is set to exactly ``1``, and the backend it selects."""

    variable: str
    backend: str


def selections(environ: Mapping[str, str]) -> tuple[Selection, ...]:
    """Return the selectors that are exactly ``1``, in the table's order: the first decides."""
    return tuple(Selection(variable, backend) for variable, backend in SELECTORS if environ.get(variable) == _ON)


def selector_warnings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Say which variables were probably meant to select a backend, and do not."""
    known = dict(SELECTORS)
    values = (
        f"{variable}={environ[variable]!r} selects nothing: only the value 1 does, "
        f"and a backend named in the configuration comes first"
        for variable, _ in SELECTORS
        if variable in environ and environ[variable] != _ON and environ[variable].strip().lower() not in _OFF
    )
    names = (_misspelt(name, known) for name in sorted(environ) if name not in known)
    return (*values, *(warning for warning in names if warning))


def _misspelt(name: str, known: Mapping[str, str]) -> str | None:
    if not _LOOKS_LIKE_ONE.fullmatch(name) and not _nearly_one(name):
        return None
    guess = nearest(name, known)
    hint = f"did you mean {guess}?" if guess else f"the selectors are {', '.join(known)}"
    return f"{name} looks like a backend selector but is none, and is not read; {hint}"


def _nearly_one(name: str) -> bool:
    """Cheap first: an environment holds a hundred names that are nothing like a selector."""
    if "KV" not in name.upper() or "USE" not in name.upper():
        return False
    from difflib import SequenceMatcher

    return any(SequenceMatcher(None, name.upper(), variable).ratio() >= 0.9 for variable, _ in SELECTORS)
