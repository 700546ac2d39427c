"""Finds the plugins that are installed, from metadata alone: our own loop, sorted, over distributions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from importlib_metadata import Distribution, EntryPoint, distributions

from kvferry.registry.records import Origin
from kvferry_plugins import PROJECT_NAME

BUILTIN_DISTRIBUTIONS = frozenset({"kvferry", "kvferry-native"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point that was found; nothing of it is imported."""

    name: str
    """As a registry knows it: plain, or ``distribution:name`` where the plain name is contested."""
    plain_name: str
    distribution: str
    version: str | None
    value: str
    origin: Origin
    contested: str | None = None
    """Why the plain name is not its own."""

    @property
    def qualified_name(self) -> str:
        """``distribution:name``, which only one entry has."""
        return f"{normalise(self.distribution)}:{self.plain_name}"


@dataclass(frozen=True, slots=True)
class Discovery:
    """All entries, sorted by name, and what was odd about their distributions."""

    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()
    distributions: Mapping[str, Distribution] = field(default_factory=dict, repr=False, compare=False)
    """Normalised name → the copy that counts, of each distribution that has an entry."""


@dataclass(frozen=True, slots=True)
class _Installed:
    name: str
    version: str
    folder: str
    points: tuple[EntryPoint, ...]
    distribution: Distribution


def discover(paths: Sequence[str] | None = None) -> Discovery:
    """Find the plugins on ``sys.path``, or on the given paths alone."""
    found: Any = distributions() if paths is None else distributions(path=list(paths))
    return from_distributions(found)


def from_distributions(found: Iterable[Distribution]) -> Discovery:
    """Find the plugins of these distributions; their order matters only between two copies of one."""
    warnings: list[str] = []
    installed = [each for each in (_read(distribution, warnings) for distribution in found) if each is not None]
    kept = [_first_copy(list(copies), warnings) for _, copies in _by_name(installed)]
    entries = [_entry(each, point) for each in kept for point in each.points]
    settled = _settle_names(_without_repetitions(entries, warnings))
    counting = {normalise(each.name): each.distribution for each in kept}
    return Discovery(tuple(sorted(settled, key=lambda entry: entry.name)), tuple(warnings), counting)


def normalise(distribution: str) -> str:
    """Spell a distribution's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _read(distribution: Distribution, warnings: list[str]) -> _Installed | None:
    folder = str(distribution.locate_file(""))
    try:
        points = _our_points(distribution)
        if points is None:
            return None
        metadata = distribution.metadata  # parsed anew each time it is asked for
        return _Installed(metadata["Name"], metadata["Version"], folder, points, distribution)
    except Exception as error:
        label = getattr(distribution, "_path", folder)
        warnings.append(f"the metadata in {label} cannot be read ({type(error).__name__}: {error}); reinstall it")
        return None


def _our_points(distribution: Distribution) -> tuple[EntryPoint, ...] | None:
    # Most distributions are none of our business: their METADATA is never parsed.
    text = distribution.read_text("entry_points.txt")
    if text is None or f"[{PROJECT_NAME}]" not in text:
        return None
    points: Any = distribution.entry_points
    return tuple(points.select(group=PROJECT_NAME))


def _by_name(installed: Iterable[_Installed]) -> Iterable[tuple[str, Iterable[_Installed]]]:
    def key(each: _Installed) -> str:
        return normalise(each.name)

    return groupby(sorted(installed, key=key), key=key)


def _first_copy(copies: list[_Installed], warnings: list[str]) -> _Installed:
    if len(copies) == 1:
        return copies[0]
    first = max((each for each in copies if each.folder == copies[0].folder), key=lambda each: each.version)
    others = {
        (_real(each.folder), each.version) for each in copies if (_real(each.folder), each.version) != _identity(first)
    }
    if others:
        listed = ", ".join(f"{version} in {folder}" for folder, version in sorted(others))
        warnings.append(
            f"distribution {first.name} is on the path more than once: {first.version} in {first.folder} counts, "
            f"{listed} does not; uninstall one"
        )
    return first


def _identity(installed: _Installed) -> tuple[str, str]:
    return _real(installed.folder), installed.version


def _real(folder: str) -> str:
    return str(Path(folder).resolve())


def _entry(installed: _Installed, point: EntryPoint) -> Entry:
    builtin = normalise(installed.name) in BUILTIN_DISTRIBUTIONS
    origin = Origin.BUILTIN if builtin else Origin.EXTERNAL
    return Entry(point.name, point.name, installed.name, installed.version, point.value, origin)


def _without_repetitions(entries: Iterable[Entry], warnings: list[str]) -> list[Entry]:
    first: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda each: (each.qualified_name, each.value)):
        kept = first.setdefault(entry.qualified_name, entry)
        if kept is not entry:
            warnings.append(
                f"distribution {entry.distribution} names {entry.plain_name!r} twice: {kept.value!r} counts, "
                f"{entry.value!r} does not"
            )
    return list(first.values())


def _settle_names(entries: Iterable[Entry]) -> list[Entry]:
    ordered = sorted(entries, key=lambda entry: (entry.plain_name, entry.origin, normalise(entry.distribution)))
    settled: list[Entry] = []
    for name, claims in groupby(ordered, key=lambda entry: entry.plain_name):
        settled += _settle_claims(name, list(claims))
    return settled


def _settle_claims(name: str, claims: list[Entry]) -> list[Entry]:
    if len(claims) == 1:
        return claims
    owners = [claim for claim in claims if claim.origin is Origin.BUILTIN][:1]
    strangers = [claim for claim in claims if claim not in owners]
    return owners + [_contest(claim, name, claims, owners) for claim in strangers]


def _contest(claim: Entry, name: str, claims: Sequence[Entry], owners: Sequence[Entry]) -> Entry:
    if owners:
        why = f"the name {name!r} is a built-in's"
    else:
        others = ", ".join(each.distribution for each in claims if each is not claim)
        why = f"the name {name!r} is claimed by {others} too"
    why += f"; to have this one, enable {claim.qualified_name!r}"
    return Entry(
        claim.qualified_name, name, claim.distribution, claim.version, claim.value, claim.origin, contested=why
    )
