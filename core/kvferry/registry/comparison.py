"""What a running worker has, beside what this shell would get: pure, from records on both sides."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.registry.records import PluginRecord, State, plain_record


@dataclass(frozen=True, slots=True)
class Compared:
    """One plugin on both sides."""

    name: str
    here: PluginRecord | None
    """As a survey left it; None = not installed here."""
    there: Mapping[str, Any] | None
    """As ``plain_record`` describes it; None = the worker does not know it."""
    differences: tuple[str, ...]
    """What would be another one if the worker were started now; none = the same."""


def compare_records(here: Iterable[PluginRecord], there: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """Pair the plugins by name, sorted.

    Args:
        here: what a survey left, so nothing is imported.
        there: the worker's ``plugin_records``.
    """
    ours = {record.name: record for record in here}
    theirs = {str(plain["name"]): plain for plain in there}
    return [
        Compared(name, ours.get(name), theirs.get(name), tuple(_differences(ours.get(name), theirs.get(name))))
        for name in sorted({*ours, *theirs})
    ]


def _differences(record: PluginRecord | None, there: Mapping[str, Any] | None) -> Iterator[str]:
    if there is None:
        yield "the worker does not know it"
        return
    if record is None:
        yield "not here"
        return
    here = plain_record(record)
    for key, words in (("distribution", "distribution"), ("version", "version"), ("entry_point", "entry point")):
        if here[key] != there[key]:
            yield f"{words} {here[key]} here, {there[key]} in the worker"
    yield from _in_another_state(record, there)


def _in_another_state(record: PluginRecord, there: Mapping[str, Any]) -> Iterator[str]:
    is_tried_here = record.state is State.DISCOVERED
    is_tried_there = there["state"] != State.DISABLED and there["stage"] != "discovery"
    why = there["reason"] or ""
    if is_tried_here and not is_tried_there:
        yield f"on here, {there['state']} in the worker {why}".rstrip()
    elif is_tried_there and not is_tried_here:
        yield f"{record.state} here {record.reason or ''}".rstrip() + f", {there['state']} in the worker"
    elif is_tried_there and there["state"] == State.FAILED:
        yield f"failed in the worker: {why}"
    if is_tried_here and is_tried_there and there["rank"] != record.rank.name.lower():
        yield f"ranks as {record.rank.name.lower()} here, as {there['rank']} in the worker"
