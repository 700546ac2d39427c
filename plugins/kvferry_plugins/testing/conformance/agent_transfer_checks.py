"""Checks of transfers: bytes, completions, and what is refused."""

import dataclasses
import time
from typing import Any

import numpy as np
import pytest

from kvferry_plugins.errors import TransferError
from kvferry_plugins.testing.conformance.agent_process import ForeignError
from kvferry_plugins.testing.conformance.agent_suite import (
    SEED,
    AgentSuite,
    Pair,
    Progress,
    Workers,
    column,
    refusal,
    submitted,
)

SEGMENTS = 8192
TRANSFERS = 64
SUBMIT_SHARE = 0.5
"""Of a large transfer's time, which submit may take at most, in the best of some tries."""


def odd_segments(nbytes: int) -> tuple[Any, Any, Any]:
    """Segments of 1 to 301 bytes whose starts are aligned to nothing, and that do not touch at the target."""
    random = np.random.default_rng(3)
    sizes = random.integers(1, 302, nbytes // 512).astype(np.int64)
    dst = np.arange(len(sizes), dtype=np.int64) * 512 + random.integers(0, 200, len(sizes))
    src = random.integers(0, nbytes - 301, len(sizes)).astype(np.int64)
    order = random.permutation(len(sizes))
    return src[order], dst[order], sizes[order]


class TransferChecks(AgentSuite):
    """What is submitted, what arrives, and what is reported."""

    # --- bytes --------------------------------------------------------------------------------------------------

    def test_what_is_written_is_in_the_targets_memory(self, pair: Pair) -> None:
        pair.arrives(pair.write_all())
        pair.expect([0], [0], [pair.nbytes], what="one segment")

    def test_many_shuffled_segments_go_each_to_its_place(self, pair: Pair) -> None:
        size = pair.nbytes // SEGMENTS
        random = np.random.default_rng(2)
        src, dst = (random.permutation(SEGMENTS) * size for _ in range(2))
        pair.arrives(pair.write(src, dst, [size] * SEGMENTS))
        pair.expect(src, dst, [size] * SEGMENTS, what=f"{SEGMENTS} shuffled segments")

    def test_segments_of_any_size_and_alignment_arrive_whole(self, pair: Pair) -> None:
        rows = odd_segments(pair.nbytes)
        pair.arrives(pair.write(*rows))
        pair.expect(*rows, what="segments of odd sizes at odd addresses")

    def test_columns_that_are_not_contiguous_are_read_as_they_lie(self, pair: Pair) -> None:
        src, dst, sizes = odd_segments(pair.nbytes)
        rows = np.stack([src + pair.ours, dst + pair.theirs, sizes], axis=1)
        pair.arrives(pair.writer.submit_strided(pair.peer, rows))
        pair.expect(src, dst, sizes, what="columns of one int64[n, 3]")

    def test_one_source_may_go_to_many_places(self, pair: Pair) -> None:
        dst = column(range(64)) * 8192
        pair.arrives(pair.write([100] * 64, dst, [5000] * 64))
        pair.expect([100] * 64, dst, [5000] * 64, what="one source, 64 destinations")

    def test_a_transfer_of_no_segments_completes(self, pair: Pair) -> None:
        completion = pair.outcome(pair.write([], [], []))
        assert completion.ok, f"a transfer of nothing is complete; it failed: {completion.error}"

    def test_segments_of_no_bytes_are_left_out(self, pair: Pair) -> None:
        rows = ([0, 10, 20, 30], [0, 1000, 2000, 3000], [0, 10, 0, 30])
        pair.arrives(pair.write(*rows))
        pair.expect(*rows, what="segments of which some have no bytes")

    def test_a_large_transfer_arrives(self, workers: Workers) -> None:
        with self.joined(workers, nbytes=self.big_bytes) as pair:
            pair.arrives(pair.write_all())
            pair.expect([0], [0], [pair.nbytes], what=f"{pair.nbytes >> 20} MiB in one segment")

    def test_memory_may_be_used_again_once_a_transfer_is_complete(self, pair: Pair) -> None:
        for seed in range(SEED, SEED + 5):
            pair.writer.fill(seed=seed)
            pair.arrives(pair.write_all())
            assert pair.target.read() == pair.writer.read(), "what was sent later was not what arrived"

    def test_both_may_write_at_once(self, pair: Pair) -> None:
        half = pair.nbytes // 2
        there = pair.write([0], [0], [half])
        rows = (column(each) for each in ([pair.theirs + half], [pair.ours + half], [half]))
        pair.target.fill(value=9)
        back = pair.target.submit(pair.back, *rows)
        pair.arrives(there)
        turned = dataclasses.replace(pair, writer=pair.target, target=pair.writer)
        turned.arrives(back)
        assert set(pair.writer.read(half)) == {9}, "what the target wrote at the same time did not arrive"

    # --- completions --------------------------------------------------------------------------------------------

    def test_a_completion_means_that_the_bytes_are_in_the_targets_memory_already(self, pair: Pair) -> None:
        pair.arrives(pair.write([0], [0], [64]))
        pair.target.fill(value=0)
        pair.target.set_progress(Progress.STILL)
        transfer = pair.write_all()
        completion = pair.outcome_within(transfer, 1.5)
        if completion is not None and completion.ok:
            pair.expect([0], [0], [pair.nbytes], what="a completion that came while the target was busy elsewhere")
        pair.target.set_progress(Progress.EAGER)
        pair.arrives(transfer)
        pair.expect([0], [0], [pair.nbytes], what="a target that was busy for a while")

    def test_nothing_lands_after_a_completion(self, pair: Pair) -> None:
        for _ in range(3):
            transfers = [pair.write_all(), pair.write(*odd_segments(pair.nbytes))]
            for transfer in transfers:
                pair.arrives(transfer)
            pair.target.fill(value=7)
            pair.step_for(0.05)
            assert set(pair.target.read()) == {7}, "bytes were written after their transfer's completion had come"

    def test_every_transfer_is_reported_once_and_only_once(self, pair: Pair) -> None:
        size = pair.nbytes // TRANSFERS
        at = column(range(TRANSFERS)) * size
        transfers = [pair.write([offset], [offset], [size]) for offset in at]
        assert len(set(transfers)) == len(transfers), f"submit gave one id to two transfers: {transfers}"
        for transfer in transfers:
            pair.arrives(transfer)
        pair.step_for(0.1)
        reported = [each.id for each in pair.writer.reported()]
        twice = sorted(each for each in set(reported) if reported.count(each) > 1)
        assert not twice, f"each transfer is reported once; these were reported again: {twice}"
        strangers = sorted(set(reported) - set(transfers))
        assert not strangers, f"completions came for transfers that nobody submitted: {strangers}"
        pair.expect(at, at, [size] * TRANSFERS, what=f"{TRANSFERS} transfers at once")

    def test_submit_returns_while_the_target_does_nothing(self, pair: Pair) -> None:
        pair.arrives(pair.write([0], [0], [64]))
        pair.target.set_progress(Progress.STILL)
        transfers = [pair.write_all() for _ in range(4)]
        pair.writer.poll()
        pair.target.set_progress(Progress.EAGER)
        for transfer in transfers:
            pair.arrives(transfer)

    def test_submit_only_begins_a_large_transfer(self, workers: Workers) -> None:
        with self.joined(workers, nbytes=self.big_bytes) as pair:
            shares = []
            for _ in range(6):
                begun = time.monotonic()
                transfer, seconds = pair.submitting("submit_timed", [0], [0], [pair.nbytes])
                pair.arrives(transfer)
                shares.append(seconds / (time.monotonic() - begun))
                if shares[-1] < SUBMIT_SHARE:
                    return
            pytest.fail(
                f"submit took {min(shares):.0%} of the time of a transfer of {pair.nbytes >> 20} MiB, the best of "
                f"{len(shares)}: it must not block, the bytes are moved by poll or by a thread"
            )

    # --- what is refused ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("what", ["lengths that do not match", "a negative size", "more bytes than there are"])
    def test_segments_that_make_no_sense_are_refused_and_nothing_is_posted(self, pair: Pair, what: str) -> None:
        rows = {
            "lengths that do not match": ([0, 4096], [0, 4096], [4096]),
            "a negative size": ([0, 4096], [0, 4096], [4096, -1]),
            "more bytes than there are": ([0, 4096], [0, 4096], [4096, 1 << 62]),
        }[what]
        if what == "more bytes than there are":
            transfer = submitted(lambda: pair.write(*rows))
            assert transfer is None or not pair.outcome(transfer).ok, f"{what} were said to be written"
        else:
            refusal(lambda: pair.write(*rows), what)
            self._posted_nothing(pair, what)
        pair.still_works()

    def test_a_refused_submit_has_posted_nothing(self, pair: Pair) -> None:
        rows = ([0, 8192, pair.nbytes], [0, 8192, 16384], [4096, 4096, 4096])
        if submitted(lambda: pair.write(*rows)) is None:
            self._posted_nothing(pair, "a transfer whose last segment is not registered")

    def _posted_nothing(self, pair: Pair, what: str) -> None:
        reported = len(pair.writer.reported())
        pair.step_for(0.1)
        assert not any(pair.target.read()), (
            f"{what}: submit raised, which means that nothing was posted, but bytes have arrived at the target"
        )
        assert len(pair.writer.reported()) == reported, f"{what}: submit raised, and a completion came all the same"

    @pytest.mark.parametrize("dtype", ["uint64", "float64", "object"])
    def test_columns_of_another_type_are_right_or_refused(self, pair: Pair, dtype: str) -> None:
        rows = [column([value]).astype(dtype) for value in (pair.ours, pair.theirs, 4096)]
        try:
            transfer = pair.writer.submit(pair.peer, *rows)
        except (TransferError, ForeignError, TypeError, ValueError):
            self._posted_nothing(pair, f"addresses as {dtype}")
        else:
            pair.arrives(transfer)
            pair.expect([0], [0], [4096], what=f"addresses as {dtype}")
        pair.still_works()
