"""What a context worker holds of a request as its chunks come, and what its engine sends along."""

from dataclasses import replace

import numpy as np
import pytest

from kvferry.transceiver.chunks import newly_complete, no_blocks
from kvferry.transceiver.sends import Send
from kvferry.transceiver.wire import MAX_AUX_BYTES
from kvferry_plugins.layout import KvLayout, LayerGroup

FULL = LayerGroup((0,), (0,), 4, 1, 8)
WINDOW = LayerGroup((1,), (1,), 2, 1, 8, window=5)
STATE = LayerGroup((2,), (2,), 4, 1, 8, kind="state")
LAYOUT = KvLayout("float32", (FULL, WINDOW, STATE), ())
PROMPT = 18
"""Its next token reads from token 14 on: ordinal 7 of the window."""


def table(*ids):
    return np.array(ids, dtype=np.int32)


def listed(chunk):
    return [(first, ids.tolist()) for first, ids in zip(chunk.first, chunk.tables, strict=True)]


def test_each_chunk_adds_what_it_completed_and_a_window_only_what_is_still_read():
    send = Send(1, b"", b"", PROMPT, 0.0, tables=no_blocks(LAYOUT, PROMPT))
    seen = []
    for computed, window in ((3, 2), (9, 5), (15, 8), (18, 9)):
        ids = np.arange(9) + 10
        ids[: window - 3] = -1  # gone already
        present = (table(1, 2, 3, 4, 5), ids[:window].astype(np.int32), table(7))
        chunk = newly_complete(LAYOUT, present, send, computed)
        send.offered_tokens = computed
        chunk.put(send.tables)
        seen.append(listed(chunk))
    assert seen == [
        [(0, []), (1, []), (0, [])],
        [(0, [1, 2]), (4, []), (0, [])],
        [(2, [3]), (7, []), (0, [])],
        [(3, [4, 5]), (7, [17, 18]), (0, [7])],
    ]
    assert [ids.tolist() for ids in send.tables] == [[1, 2, 3, 4, 5], [-1] * 7 + [17, 18], [7]]


def test_a_table_that_is_too_short_is_the_engines_mistake():
    send = Send(1, b"", b"", PROMPT, 0.0)
    with pytest.raises(ValueError, match="has 2 blocks, its first tokens need 4"):
        newly_complete(LAYOUT, (table(1, 2), table(), table()), send, 17)


def test_a_chunk_holds_its_own_blocks_and_no_others(run_pair, kit):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    for computed, held in ((3, 0), (9, 2), (9, 2), (4, 2), (21, 5)):
        pair.context.transceiver.respond_and_send_async(request, computed, last=False)
        assert kit.ledger_blocks(pair.context)["source"] == held
    pair.context.transceiver.respond_and_send_async(request)
    assert kit.ledger_blocks(pair.context)["source"] == 8
    pair.context.transceiver.cancel_request(request)
    assert kit.ledger_blocks(pair.context)["source"] == 0


def test_chunks_after_the_end_of_their_request_hold_nothing(run_pair, kit):
    pair = run_pair()
    request = pair.prefill(1, kit.PROMPT)
    pair.context.transceiver.respond_and_send_async(request, 8, last=False)
    pair.context.transceiver.cancel_request(request)
    pair.context.transceiver.respond_and_send_async(request)
    kit.wait_until(lambda: kit.ledger_blocks(pair.context)["source"] == 0)
    assert pair.context.transceiver.check_context_transfer_status(1).cancelled == (1,)


def test_what_the_engine_sends_along_comes_with_the_end_of_the_receive(run_pair, kit):
    pair = run_pair()
    request = replace(pair.prefill(1, kit.PROMPT), aux=b"first token: 7")
    pair.context.transceiver.respond_and_send_async(replace(request, aux=b"too early"), 8, last=False)
    pair.generation.transceiver.request_and_receive_async(pair.admit(request, 11))
    pair.context.transceiver.respond_and_send_async(request)
    (received,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    (sent,) = pair.context.transceiver.check_context_transfer_status(1).events
    assert (received.outcome, received.aux) == ("completed", b"first token: 7")
    assert (sent.outcome, sent.aux) == ("completed", b"")


def test_what_is_sent_along_is_bounded(run_pair, kit):
    pair = run_pair()
    request = replace(pair.prefill(1, kit.PROMPT), aux=bytes(MAX_AUX_BYTES + 1))
    with pytest.raises(ValueError, match="aux is 65537 bytes, at most 65536"):
        pair.context.transceiver.respond_and_send_async(request)
    assert not pair.context.transceiver.has_inflight_transfer(request)
    largest = replace(request, aux=bytes(MAX_AUX_BYTES))
    pair.context.transceiver.respond_and_send_async(largest)
    pair.generation.transceiver.request_and_receive_async(pair.admit(largest, 11))
    (received,) = pair.generation.transceiver.check_gen_transfer_status(1).events
    assert received.aux == largest.aux
