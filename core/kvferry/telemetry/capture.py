"""From a plan to what the manifest allows to be told of it: requested and resolved, and who decided."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from kvferry.config.nested import get_leaf
from kvferry.config.settings import NO_DEFAULT
from kvferry.telemetry.canonical import canonical, digest
from kvferry.telemetry.manifest import CAPTURE_VERSION, POLICY_VERSION, Manifest, committed_manifest
from kvferry.telemetry.rules import BOOLEAN, CATEGORY, NEVER, NUMBER, NUMBERS, Rule
from kvferry_plugins.types import Decision, Plan, Source

OTHER: Final = "other"
"""What stands for a word that the manifest does not list."""

SIZE_LIMIT: Final = 16_384
"""Bytes of a capture's text, at most."""

ITEMS_LIMIT: Final = 256
"""Items of a list of numbers, at most."""

_LARGEST: Final = 2**53
"""Beyond it JSON's readers disagree about a number."""

FILE: Final = "file"
VARIABLE: Final = "variable"
OWN_PLUGIN: Final = "built-in plugin"
OTHER_PLUGIN: Final = "other plugin"
BY: Final = (FILE, VARIABLE, OWN_PLUGIN, OTHER_PLUGIN)
"""Who decided, as a kind."""

_UNSAFE: Final = object()


@dataclass(frozen=True, slots=True)
class Capture:
    """What may be told of one plan."""

    fields: Mapping[str, Mapping[str, Any]]
    """Dotted key → ``requested``, ``resolved``, ``source``, and ``by`` where somebody decided."""
    excluded: Mapping[str, int]
    """Why a value is not here (``free text``, ``path``, …) → how many settings hold such a value."""
    manifest: str
    """Digest of the manifest that allowed it."""

    def plain(self) -> dict[str, Any]:
        """Describe it as ``text`` writes it."""
        return {
            "capture": CAPTURE_VERSION,
            "policy": POLICY_VERSION,
            "manifest": self.manifest,
            "fields": self.fields,
            "excluded": self.excluded,
        }

    @property
    def text(self) -> str:
        """Canonical JSON, at most ``SIZE_LIMIT`` bytes of ASCII."""
        return canonical(self.plain())

    @property
    def digest(self) -> str:
        """``sha256:…`` of the text: two plans that captured alike have one."""
        return digest(self.plain())


def capture(plan: Plan, *, manifest: Manifest | None = None) -> Capture:
    """Take from a plan what the manifest allows: categories, booleans and numbers.

    Args:
        plan: what ``resolve`` returned, or ``plan_resolved`` was told.
        manifest: what allows it; None = the committed one.

    Returns:
        Every setting that is there and allowed; what is not is counted by kind, and never quoted.
    """
    manifest = manifest or committed_manifest()
    decisions = {decision.setting: decision for decision in plan.decisions}
    fields: dict[str, Mapping[str, Any]] = {}
    excluded: Counter[str] = Counter()
    for rule in manifest.rules.values():
        held = _held(plan, rule.key)
        if held is _UNSAFE:
            continue
        entry = _entry(rule, held, decisions.get(rule.key), manifest.plugins) if rule.is_captured else None
        if entry is not None:
            fields[rule.key] = entry
        elif reason := _reason(rule, held):
            excluded[reason] += 1
    excluded["unknown setting"] += len(decisions.keys() - manifest.rules.keys())
    return _within_limit(Capture(fields, dict(sorted((+excluded).items())), manifest.plain()["digest"]))


def _held(plan: Plan, key: str) -> Any:
    """What the effective configuration holds, or ``_UNSAFE`` where its section is absent."""
    try:
        return get_leaf(plan.effective, key)
    except (KeyError, TypeError):
        return _UNSAFE


def _entry(rule: Rule, held: Any, decision: Decision | None, own: tuple[str, ...]) -> Mapping[str, Any] | None:
    """Describe one setting; None where a value is not what the manifest says."""
    default = None if rule.default is NO_DEFAULT else rule.default
    requested = _safe(rule, decision.requested if decision else default)
    resolved = _safe(rule, held)
    if requested is _UNSAFE or resolved is _UNSAFE:
        return None
    entry = {"requested": requested, "resolved": resolved, "source": _source(decision)}
    by = _by(decision, own) if decision else None
    return {**entry, "by": by} if by else entry


def _reason(rule: Rule, held: Any) -> str | None:
    """Why a value that is there is not captured; a section's fields are counted one by one."""
    if rule.is_captured:
        return "unsafe value"
    what = rule.capture.removeprefix(NEVER)
    return None if what == "section" or held is None or held in ((), [], {}) else what


def _safe(rule: Rule, value: Any) -> Any:
    """Return the value if the manifest allows it, ``other`` for a word it does not list, else ``_UNSAFE``."""
    return None if value is None else _CHECKS[rule.capture](rule, value)


def _category(rule: Rule, value: Any) -> Any:
    known = next((word for word in rule.values if type(word) is type(value) and word == value), _UNSAFE)
    return OTHER if known is _UNSAFE and isinstance(value, str) else known


def _boolean(_: Rule, value: Any) -> Any:
    return value if isinstance(value, bool) else _UNSAFE


def _number(_: Rule, value: Any) -> Any:
    if type(value) not in (int, float):
        return _UNSAFE
    return value if -_LARGEST <= value <= _LARGEST else _UNSAFE


def _numbers(rule: Rule, value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) > ITEMS_LIMIT:
        return _UNSAFE
    items = [_number(rule, item) for item in value]
    return _UNSAFE if _UNSAFE in items else items


_CHECKS: Final[Mapping[str, Callable[[Rule, Any], Any]]] = {
    CATEGORY: _category,
    BOOLEAN: _boolean,
    NUMBER: _number,
    NUMBERS: _numbers,
}


def _source(decision: Decision | None) -> str:
    source = decision.source if decision else "default"
    return source if source in get_args(Source) else OTHER


def _by(decision: Decision, own: tuple[str, ...]) -> str | None:
    """Name the kind of who decided: a plugin's name, a file's path and a variable are not captured."""
    if decision.by is None:
        return None
    if decision.source == "model":
        return OWN_PLUGIN if decision.by in own else OTHER_PLUGIN
    return VARIABLE if decision.source == "environment" else FILE


def _within_limit(captured: Capture) -> Capture:
    """Leave out the largest fields until the text fits; they are counted."""
    fields, excluded = dict(captured.fields), Counter(captured.excluded)
    while len(Capture(fields, excluded, captured.manifest).text) > SIZE_LIMIT:
        del fields[max(fields, key=lambda key: len(canonical(fields[key])))]
        excluded["size"] += 1
    return Capture(fields, dict(excluded), captured.manifest)
