"""Checks of agents that take whole block lists, as the CPP runtime drives them."""

import numpy as np
import pytest

from kvferry_plugins.errors import TransferError
from kvferry_plugins.testing.conformance.agent_side import HEAD_DIM, ITEM_BYTES, TOKENS_PER_BLOCK, BlockShape
from kvferry_plugins.testing.conformance.agent_suite import AgentSuite, Pair, Progress, Workers, refusal, submitted

HEAD_BYTES = TOKENS_PER_BLOCK * HEAD_DIM * ITEM_BYTES
HEADS, LAYERS, BLOCKS = 4, 2, 64
SHAPE: BlockShape = (HEADS, LAYERS, BLOCKS)
BLOCK_BYTES = LAYERS * 2 * HEADS * HEAD_BYTES
WHOLE = [(0, 0, BLOCK_BYTES)]
CANCELLED = 6
HALF_THE_HEADS = [
    (which * HEADS * HEAD_BYTES, which * HEADS * HEAD_BYTES, HEADS // 2 * HEAD_BYTES) for which in range(2 * LAYERS)
]
"""The first half of each role's heads: a run a layer and role."""


class BlockChecks(AgentSuite):
    """``block_map``, ``submit_blocks``, ``cancel`` and ``progress_bytes``."""

    def test_it_is_an_agent_that_takes_block_lists(self, pair: Pair) -> None:
        assert pair.writer.facts()["takes_blocks"], (
            "BlockTransferAgentConformance is for agents of the class BlockTransferAgent; run TransferAgentConformance"
        )

    def test_blocks_go_where_their_ids_say_and_those_not_wanted_are_left_out(self, pair: Pair) -> None:
        src, dst = [3, 4, 5, 9, 0, 63], [7, 8, 9, -1, 2, 0]
        self._arrives(pair, WHOLE, src, dst)
        self._expect(pair, WHOLE, src, dst)

    @pytest.mark.parametrize("runs", [HALF_THE_HEADS, WHOLE], ids=["half the heads", "whole blocks"])
    def test_the_runs_of_a_block_arrive_and_nothing_between_them(
        self, pair: Pair, runs: list[tuple[int, int, int]]
    ) -> None:
        order = np.random.default_rng(5).permutation(BLOCKS)
        src, dst = order.tolist(), order[::-1].tolist()
        self._arrives(pair, runs, src, dst)
        self._expect(pair, runs, src, dst)

    def test_no_blocks_are_complete_at_once(self, pair: Pair) -> None:
        self._arrives(pair, WHOLE, [], [])
        self._arrives(pair, WHOLE, [1, 2], [-1, -1])
        assert not any(pair.target.read()), "blocks that the peer does not want (−1) were written"

    @pytest.mark.parametrize(
        ("src", "dst"),
        [([BLOCKS], [0]), ([0], [BLOCKS]), ([0], [-2]), ([0, 1], [0])],
        ids=["no such block here", "no such block there", "below -1", "lengths differ"],
    )
    def test_ids_that_make_no_sense_are_refused_and_nothing_is_posted(
        self, pair: Pair, src: list[int], dst: list[int]
    ) -> None:
        what = f"blocks {[*src, 5]} to {[*dst, 5]} of {BLOCKS}"
        transfer = submitted(lambda: self._submit(pair, WHOLE, [*src, 5], [*dst, 5]))  # type: ignore[arg-type, return-value]
        if transfer is not None:
            assert not pair.outcome(transfer).ok, f"{what} were said to be written: they must be refused"
        pair.step_for(0.05)
        assert not any(pair.target.read()), f"{what} were refused, and bytes have arrived all the same"
        assert pair.target.guards_are_whole(), f"{what} were written beside the target's memory"
        self._arrives(pair, WHOLE, [1], [1])

    def test_a_run_that_leaves_its_block_is_refused(self, pair: Pair) -> None:
        refusal(lambda: self._submit(pair, [(0, 8, BLOCK_BYTES)], [1], [1]), "a run that leaves its block")
        assert not any(pair.target.read())

    def test_a_pool_that_is_not_registered_is_refused(self, pair: Pair) -> None:
        beyond = pair.theirs + pair.nbytes - BLOCK_BYTES
        transfer = submitted(lambda: pair.writer.submit_blocks(pair.peer, beyond, WHOLE, SHAPE, ([1], [2])))
        assert transfer is None or not pair.outcome(transfer).ok, (
            "blocks behind registered memory were said to be written"
        )
        assert pair.target.guards_are_whole(), "memory behind the target's registered regions was written to"

    def test_progress_is_told_until_a_transfer_is_over(self, workers: Workers) -> None:
        with self.joined(workers, nbytes=self.big_bytes) as pair:
            transfer = pair.write_all()
            seen = []
            while (done := pair.writer.progress_bytes(transfer)) is not None:
                seen.append(done)
                if pair.outcome_within(transfer, 0.0) is not None:
                    break
                for side in (pair.writer, pair.target):
                    side.step()
            pair.arrives(transfer)
            assert seen == sorted(seen), f"progress_bytes went back: {seen}"
            assert all(0 <= each <= pair.nbytes for each in seen), f"of {pair.nbytes} bytes it said {seen}"
            said = pair.writer.progress_bytes(transfer)
            assert said is None, f"progress_bytes of a transfer that is over must be None; it is {said}"

    def test_a_cancelled_transfer_ends_once_with_its_reason_and_writes_nothing_more(self, workers: Workers) -> None:
        with self.joined(workers, nbytes=self.big_bytes) as pair:
            pair.arrives(pair.write([0], [0], [64]))
            pair.target.set_progress(Progress.STILL)
            answers = pair.writer.submit_and_cancel(pair.peer, pair.theirs, CANCELLED, "no longer wanted")
            pair.target.set_progress(Progress.EAGER)
            ends = {each: pair.outcome(each) for each in answers}
            for each, is_cancelled in answers.items():
                assert ends[each].ok or (is_cancelled and "no longer wanted" in (ends[each].error or "")), (
                    f"a transfer whose cancel said {is_cancelled} ended with {ends[each].error!r}, not with the reason"
                )
            assert not all(each.ok for each in ends.values()), (
                f"none of {CANCELLED} large transfers that were cancelled at once was ended by that"
            )
            pair.target.fill(value=3)
            pair.step_for(0.2)
            assert set(pair.target.read(0, 1 << 20)) == {3}, "a cancelled transfer wrote after its completion had come"
            over = pair.writer.cancel(next(iter(answers)), "again")
            assert over is False, f"cancel of a transfer that is over must be False; it was {over}"
            ids = [each.id for each in pair.writer.reported()]
            assert len(set(ids)) == len(ids), "a cancelled transfer was reported twice"

    # --- helpers ------------------------------------------------------------------------------------------------

    def _submit(self, pair: Pair, runs: list[tuple[int, int, int]], src: list[int], dst: list[int]) -> int:
        return pair.writer.submit_blocks(pair.peer, pair.theirs, runs, SHAPE, (src, dst))  # type: ignore[no-any-return]

    def _arrives(self, pair: Pair, runs: list[tuple[int, int, int]], src: list[int], dst: list[int]) -> None:
        try:
            pair.arrives(self._submit(pair, runs, src, dst))  # type: ignore[arg-type]
        except TransferError as error:
            pytest.fail(f"blocks {src[:4]}… to {dst[:4]}… of {BLOCKS} were refused: {error}")

    def _expect(self, pair: Pair, runs: list[tuple[int, int, int]], src: list[int], dst: list[int]) -> None:
        pairs = [(here, there) for here, there in zip(src, dst, strict=True) if there >= 0]
        rows = [
            (here * BLOCK_BYTES + before, there * BLOCK_BYTES + behind, size)
            for here, there in pairs
            for before, behind, size in runs
        ]
        pair.expect(*map(list, zip(*rows, strict=True)), what="blocks by their ids")
