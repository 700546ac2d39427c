"""What no fingerprint holds, and shows only when two sides are laid side by side."""

from collections.abc import Iterator

from kvferry.doctor.hosts import beyond_loopback, is_loopback
from kvferry.preflight.changes import change, changes_of
from kvferry.preflight.sides import Side, both
from kvferry.preflight.verdicts import Change, Checked, Verdict
from kvferry_plugins.types import ScheduleStyle

CLOCKS = {
    "kv_transfer_timeout_ms": "a transfer ends for both when the shorter clock runs out",
    "kv_transfer_admission_timeout_ms": "a request waits no longer than the shorter clock allows",
}
"""Settings of which each side has its own, and what comes of two."""

PIPELINING = "enable_pipelined_transfer"


def check_pair(context: Side, generation: Side) -> Iterator[Checked]:
    """Look at everything that is not a field of the handshake."""
    yield from _roles(context, generation)
    yield from _managers(context, generation)
    if context.settings.transceiver is None or generation.settings.transceiver is None:
        return
    yield from _styles(context, generation)
    yield from _pipelining(context, generation)
    yield from _clocks(context, generation)
    yield _peers(context, generation)


def _roles(context: Side, generation: Side) -> Iterator[Checked]:
    said = both(lambda side: side.said_role or side.role.value, context, generation)
    wrong = [side for side in (context, generation) if side.said_role not in (None, side.role.value)]
    if wrong:
        named = " and ".join(f"{side.source} serves the {side.said_role} side" for side in wrong)
        reason = f"{named}; name the context side first, then the generation side"
        yield Checked("role", Verdict.FATAL, *said, reason)
    elif context.running or generation.running:
        yield Checked("role", Verdict.FINE, *said)


def _managers(context: Side, generation: Side) -> Iterator[Checked]:
    """Two unlike managers go together unless blocks that the context side gave back are wanted."""
    kinds = context.settings.manager, generation.settings.manager
    if kinds[0] == kinds[1]:
        yield Checked("manager", Verdict.FINE, *kinds)
    elif kinds == ("V2", "V1") and not (context.fact("windows").known and generation.fact("windows").known):
        reason = (
            "V2 gives back what a sliding window has left behind, V1 wants every token: refused if the model has "
            "sliding windows; add --model"
        )
        yield Checked("manager", Verdict.UNKNOWN, *kinds, reason, changes_of("windows", context, generation))
    else:
        yield Checked("manager", Verdict.INFORMATION, *kinds, "what each keeps is compared as windows and kinds")


def _styles(context: Side, generation: Side) -> Iterator[Checked]:
    styles = both(lambda side: side.settings.styles, context, generation)
    shown = _listed(styles[0]), _listed(styles[1])
    if styles[0] is None or styles[1] is None:
        reason = "no plugin here declares the runtime of both sides; give the workers' addresses where it is installed"
        yield Checked("schedule_styles", Verdict.UNKNOWN, *shown, reason)
        return
    common = styles[0] & styles[1]
    if not common:
        reason = "no way to start a request is declared by both runtimes; set transceiver_runtime alike"
        yield Checked("schedule_styles", Verdict.FATAL, *shown, reason)
    elif styles[0] != styles[1]:
        reason = f"requests have to be {' or '.join(sorted(each.value for each in common))}"
        yield Checked("schedule_styles", Verdict.INFORMATION, *shown, reason)
    else:
        yield Checked("schedule_styles", Verdict.FINE, *shown)


def _listed(styles: frozenset[ScheduleStyle] | None) -> list[str] | None:
    return sorted(each.value for each in styles) if styles is not None else None


def _pipelining(context: Side, generation: Side) -> Iterator[Checked]:
    here, there = both(lambda side: _transceiver(side, PIPELINING), context, generation)
    if here == there:
        yield Checked(PIPELINING, Verdict.FINE, here, there)
    elif here:
        reason = "the context side alone decides: chunks leave while later ones are computed"
        yield Checked(PIPELINING, Verdict.INFORMATION, here, there, reason)
    else:
        reason = "the context side alone decides, and sends nothing before the whole prompt is computed"
        changes = changes_of(PIPELINING, context, generation)
        yield Checked(PIPELINING, Verdict.WARNING, here, there, reason, changes)


def _clocks(context: Side, generation: Side) -> Iterator[Checked]:
    for name, reason in CLOCKS.items():
        values = _transceiver(context, name), _transceiver(generation, name)
        if values[0] == values[1]:
            yield Checked(name, Verdict.FINE, *values)
        else:
            yield Checked(name, Verdict.WARNING, *values, reason, changes_of(name, context, generation))


def _transceiver(side: Side, name: str) -> object:
    section = side.settings.transceiver
    return section.get(name) if section is not None else None


# --- who may reach whom ----------------------------------------------------------------------------------------------


def _peers(context: Side, generation: Side) -> Checked:
    """Whether each side lets the other in; the generation side connects to the context side."""
    values = both(_reach, context, generation)
    peers = both(lambda side: side.settings.peers, context, generation)
    if peers[0] is None or peers[1] is None:
        return Checked("peers", Verdict.UNKNOWN, *values, "a worker does not say whom it trusts")
    remote = beyond_loopback(peers[0]), beyond_loopback(peers[1])
    problem = _unreachable(context, generation, remote) or _one_sided(context, generation, remote)
    if problem is not None:
        verdict, reason, changes = problem
        return Checked("peers", verdict, *values, reason, changes)
    if not any(remote):
        reason = "both trust this machine's user alone: they have to run on one machine"
        return Checked("peers", Verdict.INFORMATION, *values, reason)
    reason = (
        "whether each one's list has the other's endpoint and key shows when they meet; the context side has to be "
        "started with --control-bind and the endpoint that the generation side's list has"
    )
    return Checked("peers", Verdict.UNKNOWN, *values, reason)


Problem = tuple[Verdict, str, tuple[Change, ...]]


def _unreachable(context: Side, generation: Side, remote: tuple[tuple[str, ...], tuple[str, ...]]) -> Problem | None:
    """What a running context worker's own endpoint proves."""
    endpoint = context.settings.endpoint
    if endpoint is None:
        return None
    if not is_loopback(endpoint) and endpoint not in (generation.settings.peers or ()):
        reason = f"the context worker listens on {endpoint}, beyond loopback, which the generation side does not trust"
        line = f"peers: [{{endpoint: '{endpoint}', public_key: …}}]"
        return Verdict.FATAL, reason, (change(generation, line),)
    if is_loopback(endpoint) and remote[1]:
        reason = (
            f"the context worker listens on {endpoint}, on loopback alone, and the generation side expects peers at "
            f"{', '.join(remote[1])}"
        )
        line = "start it with --control-bind tcp://ADDRESS:PORT, the address that the generation side's peers have"
        return Verdict.WARNING, reason, (Change(context.role, context.source, line),)
    return None


def _one_sided(context: Side, generation: Side, remote: tuple[tuple[str, ...], tuple[str, ...]]) -> Problem | None:
    """A side with peers beyond loopback beside one without."""
    if bool(remote[0]) == bool(remote[1]):
        return None
    with_peers, without = (context, generation) if remote[0] else (generation, context)
    reason = (
        f"the {with_peers.role.value} side lists peers beyond loopback, the {without.role.value} side trusts loopback "
        "alone: on two machines it is refused, on one machine no peers are needed"
    )
    line = f"peers: [{{endpoint: 'tcp://HOST:PORT', public_key: …}}], of the {with_peers.role.value} worker"
    return Verdict.WARNING, reason, (change(without, line),)


def _reach(side: Side) -> object:
    """What of a side the row shows: where it listens, and whom it lets in."""
    if side.settings.peers is None:
        return side.settings.endpoint
    listed = list(side.settings.peers) or "loopback"
    return {"endpoint": side.settings.endpoint, "trusts": listed} if side.settings.endpoint else listed
