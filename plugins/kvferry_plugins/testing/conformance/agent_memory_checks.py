"""Checks of registration, and of who may write where."""

import pytest

from kvferry_plugins.testing.conformance.agent_calls import GUARD_BYTES
from kvferry_plugins.testing.conformance.agent_suite import AgentSuite, Pair, Workers, column, refusal, submitted

_MIB = 1 << 20

REGIONS = 300
DESCRIPTOR_BYTES = 1 << 20

OUTSIDE = {"before": (-4096, 4096), "behind": (0, 4096), "across the end": (-9, 10), "far away": (1 << 45, 4096)}
"""Offset from the memory's start (``before``, ``far away``) or end, and bytes."""


def outside(where: str, nbytes: int) -> tuple[int, int]:
    """Offset and size of a segment that is not within the registered memory of so many bytes."""
    offset, size = OUTSIDE[where]
    return (offset if where in ("before", "far away") else nbytes + offset), size


class MemoryChecks(AgentSuite):
    """Registration, deregistration, and addresses."""

    def test_registrations_have_ids_of_their_own(self, workers: Workers) -> None:
        with self.begun(workers, "kit-writer", "kit-target", regions=4) as (writer, _):
            ids = writer.registrations()
            assert len(set(ids)) == len(ids) > 1, f"register gave the ids {ids}, one of them twice"

    def test_a_descriptor_is_bytes_and_short_enough_however_many_regions_there_are(self, workers: Workers) -> None:
        with self.joined(workers, nbytes=REGIONS * 4096, regions=REGIONS) as pair:
            body = pair.target.descriptor()
            assert isinstance(body, bytes), f"local_descriptor must give bytes, it gave {type(body).__name__}"
            assert len(body) <= DESCRIPTOR_BYTES, (
                f"the descriptor of {REGIONS} regions has {len(body)} bytes; {DESCRIPTOR_BYTES} are allowed"
            )
            pair.arrives(pair.write([0], [(REGIONS - 1) * 4096], [4096]))
            pair.expect([0], [(REGIONS - 1) * 4096], [4096], what="a write to the last of many regions")

    def test_every_registered_region_can_be_read_and_written(self, workers: Workers) -> None:
        with self.joined(workers, nbytes=8 * 65536, regions=8) as pair:
            offsets = column(range(8)) * 65536 + 100
            pair.arrives(pair.write(offsets, offsets[::-1], [1000] * 8))
            pair.expect(offsets, offsets[::-1], [1000] * 8, what="one transfer between eight regions")

    @pytest.mark.parametrize("where", OUTSIDE)
    def test_memory_that_the_target_has_not_registered_is_never_written(self, pair: Pair, where: str) -> None:
        offset, nbytes = outside(where, pair.nbytes)
        transfer = submitted(lambda: pair.write([0, 4096], [4096, offset], [4096, nbytes]))
        if transfer is not None:
            completion = pair.outcome(transfer)
            assert not completion.ok, (
                f"{nbytes} bytes {where} the target's registered memory were said to be written: addresses that the "
                "target has not registered must be refused, at submit or by a completion that is not ok"
            )
            assert completion.error, "a completion that is not ok must say what went wrong"
        assert pair.target.guards_are_whole(), (
            f"memory {where} the target's registered regions was written to: only registered memory may be"
        )
        pair.still_works()

    @pytest.mark.parametrize("where", OUTSIDE)
    def test_memory_that_the_writer_has_not_registered_is_never_read(self, pair: Pair, where: str) -> None:
        offset, nbytes = outside(where, pair.nbytes)
        transfer = submitted(lambda: pair.write([offset], [0], [nbytes]))
        if transfer is not None:
            assert not pair.outcome(transfer).ok, (
                f"{nbytes} bytes {where} the writer's registered memory were said to be read: they must be refused"
            )
            assert not any(pair.target.read(0, nbytes)[: min(nbytes, GUARD_BYTES)]), (
                "bytes that the writer has not registered have reached the target"
            )
        pair.still_works()

    def test_what_was_deregistered_is_refused_to_whoever_connects_afterwards(self, workers: Workers) -> None:
        with self.begun(workers, "kit-writer", "kit-target", regions=2) as (writer, target):
            half = self.memory_bytes // 2
            target.forget_registration(1)
            pair = self.meet(writer, target, self.memory_bytes)
            transfer = submitted(lambda: pair.write([0], [half], [half]))
            assert transfer is None or not pair.outcome(transfer).ok, (
                "memory was deregistered before local_descriptor was asked, and a write to it was said to be done"
            )
            assert not any(target.read(half)), "memory that had been deregistered was written to"
            pair.arrives(pair.write([0], [0], [half]))

    def test_a_writer_no_longer_reads_what_it_has_deregistered(self, workers: Workers) -> None:
        with self.joined(workers, regions=2) as pair:
            half = pair.nbytes // 2
            pair.writer.forget_registration(1)
            transfer = submitted(lambda: pair.write([half], [0], [half]))
            assert transfer is None or not pair.outcome(transfer).ok, "deregistered memory of the writer was read"
            pair.arrives(pair.write([0], [0], [half]))

    def test_a_registration_that_is_over_is_not_ended_twice(self, workers: Workers) -> None:
        with self.begun(workers, "kit-writer", "kit-target", regions=2) as (writer, _):
            said = writer.deregister_twice()
            assert said.startswith(("TransferError", "nothing")), (
                f"deregistering twice must be ignored or refused with a TransferError; it raised {said}"
            )

    def test_memory_of_a_device_that_it_does_not_serve_is_refused(self, workers: Workers) -> None:
        with self.begun(workers, "kit-writer", "kit-target") as (writer, _):
            message = refusal(lambda: writer.register_on("cuda:0"), "memory on cuda:0 at an agent for cpu")
            assert "cuda" in message.lower(), f"the refusal must name the device, cuda:0: {message}"
