import pytest

from kvferry.serving.failures import RequestError, failure_of
from kvferry_plugins.errors import (
    CacheFullError,
    HandshakeError,
    PeerLostError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (RequestError("no", param="seed"), 400, "seed"),
        (CacheFullError("full", needed=9, free=1, total=4), 503, None),
        (TransferTimeoutError("late", state="requested"), 504, None),
        (PeerLostError("gone"), 502, None),
        (HandshakeError("other model"), 502, None),
        (TransferCancelledError("cancelled there"), 410, "disaggregated_params.ctx_request_id"),
        (TransferError("a write failed"), 502, None),
        (TransferError("bad", field="opaque_state"), 400, "disaggregated_params.encoded_opaque_state"),
        (TransferError("over", field="ctx_request_id", gone=True), 410, "disaggregated_params.ctx_request_id"),
        (TransferError("it expired", field="ctx_request_id"), 400, "disaggregated_params.ctx_request_id"),
        (TransferError("in flight", field="attempt"), 409, "disaggregated_params.ctx_request_id"),
        (ValueError("what"), 400, None),
        (KeyError("bug"), 500, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_a_status_and_names_what_is_to_blame(error, status, param):
    failure = failure_of(error)
    assert (failure.status, failure.param) == (status, param)
    assert failure.body()["error"]["message"]


def test_no_room_says_whether_waiting_helps():
    never = failure_of(CacheFullError("full", needed=9, free=1, total=4))
    later = failure_of(CacheFullError("full", needed=3, free=1, total=4))
    assert "it never will" in never.message
    assert "later" in later.message
    assert later.headers == {"Retry-After": "1"}
