"""Lint of UCX's variables: settings with which a backend cannot start, or reaches nobody."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvferry.config.nearest import did_you_mean
from kvferry.doctor.deployment import Deployment, Machine
from kvferry.doctor.findings import Area, Finding, Severity
from kvferry.doctor.hosts import beyond_loopback

TRANSPORTS = "UCX_TLS"
DEVICES = "UCX_NET_DEVICES"
_LOUD = frozenset({"debug", "trace", "req", "data", "async", "func", "poll"})

_INFINIBAND = frozenset(
    {"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "dc"}
    | {"dc_x", "dc_mlx5", "srd", "gga", "gga_mlx5"}
)
_OTHER_NETWORKS = frozenset({"ugni", "ugni_rdma", "ugni_smsg", "ugni_udt", "sockcm", "rdmacm"})
_INTRA_NODE = frozenset({"sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"})
_CUDA = frozenset({"cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "gdrcopy"})
_OTHER_ACCELERATORS = frozenset({"rocm", "rocm_copy", "rocm_ipc", "ze", "ze_copy", "ze_ipc", "ze_gdr", "gaudi_gdr"})
KNOWN_TRANSPORTS = frozenset(
    {"all", "self", "tcp"} | _INFINIBAND | _OTHER_NETWORKS | _INTRA_NODE | _CUDA | _OTHER_ACCELERATORS
)
"""Transports and their aliases, as of UCX 1.22."""


@dataclass(frozen=True, slots=True)
class AllowedTransports:
    """What ``UCX_TLS`` says."""

    names: frozenset[str]
    excluded: bool
    """Whether the names are those that are left out."""

    def allows(self, *names: str) -> bool:
        """Whether any of these is allowed."""
        if self.excluded:
            return bool(set(names) - self.names)
        return "all" in self.names or bool(self.names & set(names))


def parse_transports(value: str) -> AllowedTransports:
    """Read ``a,b``, ``^a,b`` or ``all``; ``\\a`` (exactly this one) and ``a:aux`` count as ``a``."""
    text = value.strip()
    names = (name.strip().lstrip("\\").partition(":")[0] for name in text.removeprefix("^").split(","))
    return AllowedTransports(frozenset(name for name in names if name), text.startswith("^"))


def ucx_findings(environ: Mapping[str, str], deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    """Look at UCX's variables, which NIXL obeys too."""
    if not (deployment.may_use("NIXL") or deployment.may_use("UCX")):
        return
    if TRANSPORTS in environ:
        yield from _transports(environ[TRANSPORTS], deployment, machine)
    if DEVICES in environ:
        yield from _devices(environ[DEVICES], deployment, machine)
    if environ.get("UCX_LOG_LEVEL", "").lower() in _LOUD:
        level = environ["UCX_LOG_LEVEL"]
        yield _finding(Severity.INFO, "UCX_LOG_LEVEL", f"is {level!r}: transfers are slow", fix="unset it, or set warn")


def _transports(value: str, deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    allowed = parse_transports(value)
    if not allowed.names:
        what = "is set and empty: UCX does not start" if not allowed.excluded else "excludes nothing"
        severity = Severity.WARNING if allowed.excluded else Severity.ERROR
        yield _finding(severity, TRANSPORTS, what, fix="unset it, or name the transports: tcp,self,sm")
        return
    for name in sorted(allowed.names - KNOWN_TRANSPORTS):
        guess = did_you_mean(name, KNOWN_TRANSPORTS).removeprefix("; ")
        yield _finding(Severity.WARNING, TRANSPORTS, f"names {name!r}, which is no transport of UCX", fix=guess)
    yield from _unreachable(value, allowed, deployment, machine)
    if _is_gpu(deployment, machine) and not allowed.allows("cuda", "cuda_copy", "cuda_ipc"):
        what = f"is {value!r}, without CUDA, and the KV cache is in device memory"
        yield _finding(Severity.ERROR, TRANSPORTS, what, fix="add cuda to it")


def _unreachable(value: str, allowed: AllowedTransports, deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    if _has_network(allowed, machine):
        return
    without = f"is {value!r}, without tcp" + (" (and no InfiniBand is here)" if allowed.allows(*_INFINIBAND) else "")
    add = "take tcp out of the exclusion" if allowed.excluded else "add tcp to it"
    if deployment.may_use("NIXL"):
        severity = Severity.ERROR if deployment.backend == "NIXL" else Severity.WARNING
        yield _finding(
            severity,
            TRANSPORTS,
            f"{without}: NIXL's agent does not start",
            cause="NIXL needs a transport that notices a peer's failure, and those within a node do not",
            fix=f"{add}, or unset it",
        )
    if deployment.may_use("UCX") and not allowed.allows(*_INTRA_NODE):
        severity = Severity.ERROR if deployment.backend == "UCX" else Severity.WARNING
        yield _finding(severity, TRANSPORTS, f"is {value!r}: UCX reaches no other process", fix=f"{add}, or unset it")
    elif deployment.backend == "UCX" and (remote := beyond_loopback(deployment.peers)):
        yield _finding(Severity.ERROR, TRANSPORTS, f"{without}: UCX does not reach {', '.join(remote)}", fix=add)


def _has_network(allowed: AllowedTransports, machine: Machine) -> bool:
    has_infiniband = bool(machine.infiniband_devices) and allowed.allows(*_INFINIBAND)
    return allowed.allows("tcp") or allowed.allows(*_OTHER_NETWORKS & allowed.names) or has_infiniband


def _is_gpu(deployment: Deployment, machine: Machine) -> bool:
    return deployment.device == "cuda" or (deployment.device == "auto" and machine.has_gpu)


def _devices(value: str, deployment: Deployment, machine: Machine) -> Iterator[Finding]:
    text = value.strip()
    named = {name.strip().partition(":")[0] for name in text.split(",")} - {""}
    if not named:
        yield _finding(Severity.ERROR, DEVICES, "is set and empty: UCX has no network", fix="unset it")
        return
    if text.startswith("^") or "all" in named:
        return
    here = machine.network_devices | machine.infiniband_devices
    unknown = sorted(named - here) if here else []
    if unknown:
        yield _unknown_devices(unknown, named, here, deployment)
    if named == {"lo"} and (remote := beyond_loopback(deployment.peers)):
        what = f"is lo, and peers are beyond it: {', '.join(remote)}"
        yield _finding(Severity.ERROR, DEVICES, what, fix=f"name the device that reaches them: {_listed(here)}")


def _unknown_devices(unknown: list[str], named: set[str], here: frozenset[str], deployment: Deployment) -> Finding:
    nothing_left = set(unknown) == named
    rest = ": NIXL's agent does not start, and UCX stays within this machine" if nothing_left else ""
    return _finding(
        Severity.ERROR if nothing_left and deployment.backend else Severity.WARNING,
        DEVICES,
        f"names {', '.join(unknown)}, which {'is' if len(unknown) == 1 else 'are'} not here{rest}",
        fix=f"the devices here: {_listed(here)}",
    )


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _finding(severity: Severity, variable: str, what: str, *, cause: str = "", fix: str = "") -> Finding:
    return Finding(Area.ENVIRONMENT, severity, variable, what, cause, fix)
