"""A peer's instance: its ranks, and what travels between them and ours."""

from collections.abc import Mapping

from kvferry.transceiver.mapping import GeometryError, Overlap, share
from kvferry.transceiver.shared import Shared
from kvferry.transceiver.wire import Hello, MalformedMessageError
from kvferry.transceiver.world import Member, members_from_wire
from kvferry_plugins.errors import HandshakeError
from kvferry_plugins.layout import KvLayout
from kvferry_plugins.types import Role

SHARES_KEPT = 64
"""Peers' instances of which it is known what travels."""


def members_of(hello: Hello, endpoint: str, layout: KvLayout) -> tuple[Member, ...]:
    """The ranks of a peer's instance, itself among them.

    Args:
        hello: the part of the handshake that carries its memory.
        endpoint: where the peer was reached, if it was.
        layout: its own, from the same message.

    Raises:
        MalformedMessageError: it is none of the ranks that it describes.
    """
    if not hello.world:
        if hello.rank:
            raise MalformedMessageError(f"rank {hello.rank} of an instance that it does not describe")
        return (Member(0, endpoint, hello.instance, hello.incarnation, layout),)
    members = members_from_wire(hello.world)
    if hello.rank >= len(members):
        raise MalformedMessageError(f"rank {hello.rank} of {len(members)}")
    own = members[hello.rank]
    if own.name != (hello.instance, hello.incarnation) or own.layout != layout:
        raise MalformedMessageError(f"rank {hello.rank} is another worker than its instance says")
    return members


class Shares:
    """What travels to or from each peer's instance; made once an instance, as writers prepare for it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._known: dict[tuple[str, int], tuple[tuple[Member, ...], Mapping[tuple[int, int], Overlap]]] = {}

    def with_instance(self, members: tuple[Member, ...], peer: str) -> Mapping[tuple[int, int], Overlap]:
        """What travels, by (context rank, generation rank), from the layouts of all ranks on both sides.

        Raises:
            HandshakeError: something would be left out; the message calls the instance ``peer``.
        """
        world = self._shared.world
        assert world is not None
        name = members[0].name
        known = self._known.get(name)
        if known is not None and known[0] == members:
            return known[1]
        theirs = tuple(member.layout for member in members)
        is_source = self._shared.role is Role.CONTEXT
        try:
            shares = share(world.layouts, theirs) if is_source else share(theirs, world.layouts)
        except GeometryError as error:
            values = error.values if is_source else error.values[::-1]
            message = f"{peer} cannot hand over KV to this worker: {error}"
            raise HandshakeError(message, fields={error.field: values}) from error
        self._known[name] = members, shares
        while len(self._known) > SHARES_KEPT:
            del self._known[next(iter(self._known))]
        return shares
