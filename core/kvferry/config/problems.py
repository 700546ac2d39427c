"""From pydantic's findings to ours: where, what is wrong, what was probably meant."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvferry.config.nearest import nearest
from kvferry_plugins.errors import ConfigError, ResolutionError


def find_problems(error: ValidationError) -> list[tuple[str, str]]:
    """Return (dotted key, what is wrong and what to write) for everything that pydantic found."""
    return [(dotted(detail), _describe(detail)) for detail in error.errors(include_url=False)]


def config_errors(error: ValidationError, *, origin: str | None = None) -> list[ConfigError]:
    """Return one ConfigError a finding, each naming the file (if any) and the dotted key."""
    where = f"{origin}: " if origin else ""
    return [ConfigError(f"{where}{text}", setting=key or None) for key, text in find_problems(error)]


def one_or_all(errors: list[ConfigError]) -> ConfigError:
    """Return the only error as itself, several as a ResolutionError."""
    return errors[0] if len(errors) == 1 else ResolutionError(errors)


def dotted(detail: ErrorDetails) -> str:
    """Return the dotted key that a finding is about."""
    return ".".join(str(part) for part in detail["loc"] if part != "[key]")


def known_keys() -> Iterator[str]:
    """Yield every dotted key of the configuration, sections too."""
    from kvferry.config.settings import settings

    return (setting.key for setting in settings())


def unknown_key(key: str) -> str:
    """Say that a dotted key does not exist, and which one was probably meant."""
    section, _, name = key.rpartition(".")
    place = f"in {section}" if section else "at the top level"
    siblings = list(_siblings(section))
    guess = nearest(name, siblings)
    if guess is not None:
        hint = f"did you mean {guess!r}?"
    elif elsewhere := [known for known in known_keys() if known.rpartition(".")[2] == name]:
        hint = f"did you mean {elsewhere[0]!r}?"
    else:
        hint = f"known there: {', '.join(sorted(siblings))}"
    return f"{key!r}: unknown key {name!r} {place}; {hint}"


def _describe(detail: ErrorDetails) -> str:
    key = dotted(detail)
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        return unknown_key(key)
    rule = _rule(detail)
    return f"{key or 'the configuration'!r} {rule}, but is {_shown(detail['input'])}{_suggestion(detail)}"


def _rule(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "string_pattern_mismatch":
        is_endpoint = detail["loc"][-1] == "endpoint"
        return "should be tcp://HOST:PORT" if is_endpoint else "should be a CURVE public key of 40 Z85 characters"
    if kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
        return "should be a section (a mapping of keys to values)"
    if kind == "tuple_type":
        return "should be a list"
    if kind == "value_error" and "error" in context:
        return str(context["error"])
    rule = detail["msg"].replace("Input should", "should").replace("String should", "should")
    return rule.replace("True, False", "true, false")


def _suggestion(detail: ErrorDetails) -> str:
    """Name the allowed word that a wrong word was probably meant to be."""
    expected = detail.get("ctx", {}).get("expected", "")
    value = detail["input"]
    if detail["type"] != "literal_error" or not isinstance(value, str):
        return ""
    guess = nearest(value, expected.split("'")[1::2])
    return f"; did you mean {guess!r}?" if guess else ""


def _shown(value: object) -> str:
    """Print a value as YAML's author knows it, cut to a readable length."""
    named = {None: "null", True: "true", False: "false"}
    text = named[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _siblings(section: str) -> Iterable[str]:
    """Name the keys of a section; the positions within a list are none of its name."""
    from kvferry.config.settings import settings

    wanted = ".".join(part for part in section.split(".") if not part.isdigit())
    return [setting.name for setting in settings() if setting.key.rpartition(".")[0] == wanted]


def require_text_keys(mapping: Mapping[Any, Any], origin: str | None = None, prefix: str = "") -> None:
    """Refuse keys that YAML read as something else than text, such as ``1`` or ``yes``.

    Raises:
        ConfigError: naming the first such key.
    """
    for key, value in mapping.items():
        if not isinstance(key, str):
            where = f"{origin}: " if origin else ""
            raise ConfigError(f"{where}the key {prefix}{key!r} is no text; quote it, or mend the indentation")
        if isinstance(value, Mapping):
            require_text_keys(value, origin, f"{prefix}{key}.")
