"""Who has joined rank 0 so far, and who may not; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.transceiver.fingerprint import (
    PLUGIN_FIELDS,
    Fingerprint,
    Severity,
    both_values,
    compare,
    compare_protocol,
)
from kvferry.transceiver.wire import Join
from kvferry.transceiver.world import Member, member_from_wire
from kvferry_plugins.errors import HandshakeError
from kvferry_plugins.types import RankSpec, Role


def topology_of(spec: RankSpec) -> tuple[int, int, int]:
    """Tensor, pipeline and data parallel size."""
    return spec.topology.tensor, spec.topology.pipeline, spec.topology.data


@dataclass(slots=True)
class Gathering:
    """The ranks of an instance on their way to rank 0."""

    spec: RankSpec
    role: Role
    fingerprint: Fingerprint
    members: dict[int, Member] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return [rank for rank in range(self.spec.topology.ranks) if rank not in self.members]

    def admit(self, join: Join) -> Member:
        """Enter a rank; the same one may say so twice.

        Raises:
            HandshakeError: it cannot be a rank of this instance, or there are two of its id; ``fields`` say why, with
                rank 0's value first.
            MalformedMessageError: its layout contradicts itself.
        """
        member = member_from_wire(join.member)
        differences = self._differences(join)
        if differences:
            raise HandshakeError(
                f"rank {member.rank} at {member.endpoint} cannot join: {_listed(differences)}", fields=dict(differences)
            )
        known = self.members.get(member.rank)
        if known is not None and known.name != member.name:
            raise HandshakeError(
                f"two processes are rank {member.rank}: one at {known.endpoint}, another at {member.endpoint}; "
                "give each rank of the instance an id of its own",
                fields={"rank": (known.endpoint, member.endpoint)},
            )
        self.members[member.rank] = member
        return member

    def _differences(self, join: Join) -> Mapping[str, tuple[Any, Any]]:
        """What keeps a rank out: field → (rank 0's value, its value)."""
        protocol = compare_protocol(join.protocol)
        if protocol is not None:
            return {protocol.field: (protocol.ours, protocol.theirs)}
        expected = {"role": self.role.value, "topology": topology_of(self.spec), "data_rank": self.spec.data_rank}
        said = {"role": join.role, "topology": tuple(join.topology), "data_rank": join.data_rank}
        found: dict[str, tuple[Any, Any]] = {
            name: (expected[name], said[name]) for name in expected if expected[name] != said[name]
        }
        if not found and join.member.rank >= self.spec.topology.ranks:
            found["rank"] = (f"0 … {self.spec.topology.ranks - 1}", join.member.rank)
        for difference in compare(self.fingerprint, join.fingerprint, self.role):
            if difference.severity is Severity.FATAL or difference.field in PLUGIN_FIELDS:
                found[difference.field] = (difference.ours, difference.theirs)
        return found


def _listed(differences: Mapping[str, tuple[Any, Any]]) -> str:
    listed = "; ".join(both_values(name, *values, here="at rank 0") for name, values in differences.items())
    advice = " — start all ranks with the same plugins" if set(PLUGIN_FIELDS) & differences.keys() else ""
    return listed + advice


def missing_ranks(missing: list[int], ranks: int, seconds: float, detail: str = "") -> HandshakeError:
    """The error of an instance that did not come together in time."""
    named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    advice = detail or "is it started, and does it reach rank 0?"
    message = f"{named} of {ranks} did not join within {seconds:g} s: {advice}"
    return HandshakeError(message, fields={"missing": (missing, None)})
