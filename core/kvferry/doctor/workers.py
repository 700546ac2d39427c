"""What a running worker's own status tells: pure."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvferry.doctor.findings import Area, Finding, Severity
from kvferry.doctor.peers import peer_findings

_BAD_COUNTERS: Mapping[str, str] = {
    "internal_errors": "an error of kvferry's own; its log has the traceback",
    "agent_errors": "the transport failed in its own progress; its log has the first",
    "malformed_messages": "somebody that is no kvferry worker, or of another version, sends to its control socket",
    "misdirected_messages": "a peer confuses requests, or a router sends parameters to the wrong worker",
    "handshakes_refused": "a peer differs: kvferry explain --worker shows which, its log says in what",
}
_OWNERS_SHOWN = 5


def worker_findings(status: Mapping[str, Any], address: str, *, peers: Sequence[str] = ()) -> Iterator[Finding]:
    """Look at one worker.

    Args:
        status: its ``/status``.
        address: as the operator wrote it.
        peers: endpoints of the configuration, where one is given.
    """
    transceiver: Mapping[str, Any] = status["transceiver"]
    yield from _alive(status, transceiver, address)
    yield from _quarantine(transceiver, address)
    for warning in status["plan"]["warnings"]:
        yield _finding(Severity.WARNING, address, f"its plan: {warning}")
    yield from _counters(transceiver, address)
    yield from _observers(status, address)
    yield from _silent_peers(transceiver, address)
    if transceiver.get("endpoint"):
        yield from peer_findings(peers, bound_to=transceiver["endpoint"])


def difference_findings(
    status: Mapping[str, Any],
    address: str,
    *,
    plan: Mapping[str, Any] | None,
    plugins: Mapping[str, str],
    digests: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Finding]:
    """Say where a running worker differs from what a start would give now.

    Args:
        status: its ``/status``.
        address: as the operator wrote it.
        plan: of the configuration; None = none was given.
        plugins: name → distribution and version, of what is installed here.
        digests: name → the short digest of its files.
    """
    runs = status["plan"]
    if plan is not None:
        pairs = {"backend": _transceiver("backend"), "runtime": _transceiver("runtime")}
        for name, read in pairs.items():
            if read(runs) != read(plan):
                what = f"runs with {name} {read(runs)}, and this configuration gives {read(plan)}"
                yield _finding(Severity.WARNING, address, what, fix="restart it, or give doctor its configuration")
    for name, distribution in status["plugins"].items():
        here = plugins.get(name)
        if here is not None and here != distribution:
            what = f"runs plugin {name} of {distribution}, and {here} is installed"
            yield _finding(Severity.WARNING, address, what, fix="restart it")
        elif here is not None and _runs_other_files(status, name, digests.get(name)):
            what = f"runs plugin {name} of {distribution} with other files than are installed"
            yield _finding(Severity.WARNING, address, what, fix="restart it")


def _runs_other_files(status: Mapping[str, Any], name: str, digest: str | None) -> bool:
    fingerprint: Mapping[str, Any] = status["transceiver"].get("fingerprint") or {}
    runs = (fingerprint.get("fields", {}).get("plugins.digest") or {}).get(name)
    return None not in (runs, digest) and runs != digest


def _transceiver(key: str) -> Any:
    return lambda plan: plan["transceiver"][key]


def _alive(status: Mapping[str, Any], transceiver: Mapping[str, Any], address: str) -> Iterator[Finding]:
    restart = "kill -USR1 its process for all stacks, then restart it"
    dead = [
        *(["transfer loop"] if not transceiver.get("loop_alive", True) else []),
        *(["engine"] if not status["engine"].get("alive", True) else []),
    ]
    for part in dead:
        yield _finding(Severity.ERROR, address, f"its {part} is dead: it serves nobody", fix=restart)
    if status["draining"]:
        yield _finding(Severity.INFO, address, "is draining: it takes no new request")
    elif not status["ready"] and not dead:
        yield _finding(Severity.ERROR, address, "is not ready", cause=status.get("not_ready") or "", fix=restart)
    elif not dead:
        plan = status["plan"]["transceiver"]
        what = f"is a {status['role']} worker, ready: {plan['runtime']} on {plan['backend']}"
        yield _finding(Severity.OK, address, what)


def _quarantine(transceiver: Mapping[str, Any], address: str) -> Iterator[Finding]:
    ledger: Mapping[str, Any] = transceiver.get("ledger") or {}
    blocks = ledger.get("blocks", {}).get("quarantine", 0)
    if not blocks:
        return
    entries = [each for each in ledger.get("entries", ()) if each["owner"] == "quarantine"]
    owners = "; ".join(
        f"request {each['request_id']}: {each['blocks']} for {each['seconds']:.0f} s, freed by {each['freed_by']}"
        for each in entries[:_OWNERS_SHOWN]
    )
    yield _finding(
        Severity.WARNING,
        address,
        f"{blocks} block(s) are in quarantine",
        cause=f"a writer is not proven to have stopped ({owners})",
        fix="they come back when that worker answers or its process has ended; end it if it hangs",
    )


def _counters(transceiver: Mapping[str, Any], address: str) -> Iterator[Finding]:
    counters: Mapping[str, int] = transceiver.get("counters") or {}
    for name, cause in _BAD_COUNTERS.items():
        if counters.get(name):
            what = f"has counted {counters[name]} {name.replace('_', ' ')}"
            yield _finding(Severity.WARNING, address, what, cause=cause)
    for role, totals in (transceiver.get("outcomes") or {}).items():
        if totals.get("failed"):
            what = f"{totals['failed']} of {sum(totals.values())} transfers failed, as {role}"
            yield _finding(Severity.INFO, address, what, fix="its log names the cause of each")


def _observers(status: Mapping[str, Any], address: str) -> Iterator[Finding]:
    for name, counts in (status.get("observers") or {}).items():
        lost = {key: counts[key] for key in ("raised", "dropped") if counts.get(key)}
        if lost:
            told = ", ".join(f"{key} {value}" for key, value in lost.items())
            what = f"the observer {name} lost news: {told} of {counts['told']}"
            yield _finding(Severity.WARNING, address, what, fix="its log has the first cause; tell the plugin's author")


def _silent_peers(transceiver: Mapping[str, Any], address: str) -> Iterator[Finding]:
    for link in transceiver.get("peers") or ():
        if link.get("state") == "silent":
            what = f"has not heard of its peer at {link['address']} for {link['heard_seconds_ago']:.0f} s"
            yield _finding(Severity.WARNING, address, what, fix="is that worker running, and the network up?")
        for warning in link.get("warnings") or ():
            yield _finding(Severity.WARNING, address, f"differs from its peer at {link['address']}: {warning}")


def _finding(severity: Severity, subject: str, what: str, *, cause: str = "", fix: str = "") -> Finding:
    return Finding(Area.WORKER, severity, subject, what, cause, fix)
