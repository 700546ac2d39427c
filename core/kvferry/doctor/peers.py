"""Whether the peers of a deployment can be reached from here, and this worker by them."""

from collections.abc import Iterator, Sequence

from kvferry.doctor.findings import Area, Finding, Severity
from kvferry.doctor.hosts import beyond_loopback, is_loopback, is_unspecified


def peer_findings(peers: Sequence[str], *, bound_to: str | None = None) -> Iterator[Finding]:
    """Look at configured endpoints.

    Args:
        peers: ``tcp://HOST:PORT`` each.
        bound_to: where a running worker's control socket listens; None = no worker was asked.
    """
    for number, endpoint in enumerate(peers):
        subject = f"peers.{number}.endpoint"
        if is_unspecified(endpoint):
            what = f"is {endpoint}, where one can listen and not connect"
            yield _finding(Severity.ERROR, subject, what, fix="write the address at which that worker is reached")
        elif is_loopback(endpoint):
            what = f"is {endpoint}, on loopback: it is reached from its own machine alone, and needs no entry there"
            yield _finding(Severity.WARNING, subject, what, fix="write its address in the network, or leave it out")
    remote = beyond_loopback(peers)
    if not remote:
        return
    if bound_to is None:
        what = f"{', '.join(remote)} cannot reach a worker that listens on loopback, which is the default"
        fix = "start it with --control-bind tcp://ADDRESS:PORT, the address that the peers' configuration has"
        yield _finding(Severity.INFO, "peers", what, fix=fix)
    elif is_loopback(bound_to):
        what = f"{', '.join(remote)} cannot reach this worker: its control socket is on {bound_to}"
        yield _finding(Severity.ERROR, "peers", what, fix="start it with --control-bind tcp://ADDRESS:PORT")


def _finding(severity: Severity, subject: str, what: str, *, fix: str) -> Finding:
    return Finding(Area.CONFIGURATION, severity, subject, what, fix=fix)
