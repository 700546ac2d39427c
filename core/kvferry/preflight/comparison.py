"""The handshake's own comparison, of two sides that have not met."""

from collections.abc import Iterator
from dataclasses import replace

from kvferry.preflight.changes import changes_of
from kvferry.preflight.sides import Fact, Side
from kvferry.preflight.verdicts import Checked, Verdict
from kvferry.transceiver.fingerprint import (
    ADVICE,
    GEOMETRY,
    SEVERITY,
    Difference,
    Fingerprint,
    compare,
    compare_protocol,
)
from kvferry.transceiver.mapping import GeometryError, blocks_fit, share
from kvferry_plugins.types import Role

STAGE = "a stage's"
"""What a fingerprint says of the layers where it has one pipeline stage's; see ``make_fingerprint``."""

OFF = (
    "the transceiver is off on both sides: nothing can be handed over; write cache_transceiver_config: {backend: NIXL} "
    "in both"
)


def compare_sides(context: Side, generation: Side) -> list[Checked]:
    """Say of each field of the handshake how it is, in the handshake's order."""
    context, generation = _same_model(context, generation)
    differences = {each.field: each for each in _differences(context, generation)}
    if not differences.keys() & set(GEOMETRY):  # layouts meet only where the fingerprints go together
        differences |= {each.field: each for each in _unmappable(context, generation)}
    for each in _blocks_of_any_model(context, generation):
        differences.setdefault(each.field, each)
    return [_checked(name, context, generation, differences.get(name)) for name in ("protocol", *SEVERITY)]


def _same_model(context: Side, generation: Side) -> tuple[Side, Side]:
    """One checkpoint for both sides is one model, whether or not its weights are there to be compared."""
    field = "model.weights"
    if context.model is None or context.model != generation.model or context.fact(field).known:
        return context, generation
    same = {field: Fact(f"those of {context.model}")}
    return replace(context, facts={**context.facts, **same}), replace(generation, facts={**generation.facts, **same})


def _differences(context: Side, generation: Side) -> Iterator[Difference]:
    """What differs of the fields that are known of both sides; the context side's value is ours."""
    known = [name for name in SEVERITY if context.fact(name).known and generation.fact(name).known]
    ours, theirs = ({name: side.fact(name).value for name in known} for side in (context, generation))
    yield from compare(Fingerprint(ours, context.locked or generation.locked), theirs, Role.CONTEXT)
    protocols = context.fact("protocol"), generation.fact("protocol")
    if all(fact.known for fact in protocols):
        protocol = compare_protocol(*(tuple(fact.value) for fact in reversed(protocols)))
        if protocol is not None:
            yield protocol


def _unmappable(context: Side, generation: Side) -> Iterator[Difference]:
    """What shows only when the layouts of all ranks meet."""
    if context.layouts is None or generation.layouts is None:
        return
    try:
        share(context.layouts, generation.layouts)
    except GeometryError as error:
        yield Difference(error.field, *error.values, SEVERITY[error.field])


def _blocks_of_any_model(context: Side, generation: Side) -> Iterator[Difference]:
    """Block sizes between which no layer that keeps every token has a way, whatever the model."""
    name = "tokens_per_block"
    if context.fact(name).known and generation.fact(name).known:
        return
    ours, theirs = (side.settings.cache[name] for side in (context, generation))
    if not blocks_fit(ours, theirs):
        yield Difference(name, ours, theirs, SEVERITY[name])


def _checked(name: str, context: Side, generation: Side, difference: Difference | None) -> Checked:
    facts = {Role.CONTEXT: context.fact(name), Role.GENERATION: generation.fact(name)}
    if difference is not None:
        reason = "; ".join(part for part in (ADVICE.get(name, ""), *_doubts(_known(facts))) if part)
        verdict, changes = Verdict(difference.severity.value), changes_of(name, context, generation)
        return Checked(name, verdict, difference.ours, difference.theirs, reason, changes)
    values = facts[Role.CONTEXT].value, facts[Role.GENERATION].value
    if name == "backend" and len(_known(facts)) == 2 and not any(values):
        return Checked(name, Verdict.FATAL, *values, OFF)
    doubts = _doubts(facts)
    if name == "layers" and STAGE in values and None in (context.layouts, generation.layouts):
        doubts = ["one pipeline stage's layers are known: whether all have what they need shows when the two meet"]
    return Checked(name, Verdict.UNKNOWN if doubts else Verdict.FINE, *values, "; ".join(doubts))


def _known(facts: dict[Role, Fact]) -> dict[Role, Fact]:
    return {role: fact for role, fact in facts.items() if fact.known}


def _doubts(facts: dict[Role, Fact]) -> list[str]:
    """Why the values may be others, one line a side, or one where both have the same reason."""
    doubts = {role: fact.doubt for role, fact in facts.items() if fact.doubt}
    if len(set(doubts.values())) == 1 and len(doubts) == 2:
        return [next(iter(doubts.values()))]
    return [f"{role.value} side: {doubt}" for role, doubt in doubts.items()]
