"""Judges a model plugin's answers: is one in the vocabulary, is it a configuration, which names are near another."""

from collections.abc import Iterator, Mapping
from typing import Any

NOT_FOR_MODELS = "cache_transceiver_config"
"""Only the user turns disaggregation on."""

SHOWN = 400
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """Write a value, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"


def called(hook: str, arguments: Mapping[str, Any]) -> str:
    """Write a question as a call."""
    return f"{hook}({', '.join(f'{name}={shown(value)}' for name, value in arguments.items())})"


def outside(hook: str, answer: object) -> str | None:
    """Say why an answer is outside its hook's vocabulary."""
    if answer is None:
        return None
    if hook == "preferred_transceiver_runtime":
        return (
            None if answer in ("PYTHON", "CPP") else f"answered {shown(answer)}, which is not 'PYTHON', 'CPP' or None"
        )
    if not isinstance(answer, Mapping):
        return f"answered {shown(answer)}, which is no mapping and not None"
    tops = [key for key in answer if str(key).partition(".")[0] == NOT_FOR_MODELS]
    return f"answered {shown(answer)}: only the user sets {tops[0]}" if tops else None


def not_a_section(value: object, at: str) -> str | None:
    """Say where a default is no nested configuration of plain values."""
    if isinstance(value, Mapping):
        strange = [key for key in value if not isinstance(key, str) or "." in key]
        if strange:
            return f"the key {strange[0]!r} is no single name"
        faults = (not_a_section(item, f"{at}.{key}".lstrip(".")) for key, item in value.items())
        return next((fault for fault in faults if fault is not None), None)
    plain = value is None or isinstance(value, str | int | float | bool | list | tuple)
    return None if plain else f"{at} is {shown(value)}, which is no plain value"


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a nested mapping."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def neighbours(architecture: str) -> Iterator[str]:
    """Yield names that are near an architecture's and are others."""
    yield from (f"My{architecture}", f"{architecture}V2", architecture[:-1], architecture[1:], f"{architecture} ")
    yield from (architecture.lower(), architecture.upper(), architecture.swapcase(), "", "ForCausalLM")
    family = architecture.partition("For")[0]
    yield from (family, f"{family}Model", f"{family}ForConditionalGeneration", f"{family}MTPForCausalLM")
