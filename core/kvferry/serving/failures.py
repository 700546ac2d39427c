"""Errors as OpenAI clients read them: an HTTP status, and which parameter is to blame."""

from dataclasses import dataclass

from kvferry_plugins.errors import (
    CacheFullError,
    HandshakeError,
    KvferryError,
    PeerLostError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)

PARAMETERS = {
    "attempt": "disaggregated_params.ctx_request_id",
    "disaggregated_params": "disaggregated_params",
    "opaque_state": "disaggregated_params.encoded_opaque_state",
    "prompt": "prompt",
    "prompt_digest": "prompt",
    "prompt_tokens": "prompt",
    "token": "disaggregated_params.encoded_opaque_state",
}
"""A transceiver's field → what the client calls it; others are ``disaggregated_params.FIELD``."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One answer to a request that cannot be served."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after: int | None = None
    """Seconds."""

    def body(self) -> dict[str, object]:
        """The JSON object of OpenAI's errors."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers beyond the usual ones."""
        return {"Retry-After": str(self.retry_after)} if self.retry_after is not None else {}


class RequestError(KvferryError):
    """The request itself cannot be served; the worker is fine."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str = "invalid") -> None:
        super().__init__(message)
        self.failure = Failure(status, message, code, param, retry_after=1 if status == 503 else None)


def failure_of(error: BaseException) -> Failure:
    """Say what a client hears of an error."""
    message = str(error) or type(error).__name__
    match error:
        case RequestError():
            return error.failure
        case CacheFullError():
            figures = f"needed {error.needed} blocks, {error.free} of {error.total} are free"
            hint = "it never will" if error.needed > error.total else "send it again later"
            text = f"the KV cache has no room for this request ({figures}; {hint}): {message}"
            return Failure(503, text, "cache_full", retry_after=1)
        case TransferTimeoutError():
            return Failure(504, message, "handoff_timeout")
        case PeerLostError():
            return Failure(502, message, "peer_lost")
        case TransferCancelledError():
            return Failure(410, message, "handoff_cancelled", "disaggregated_params.ctx_request_id")
        case HandshakeError():
            return Failure(502, message, "handshake_refused")
        case TransferError():
            return _transfer_failure(error, message)
        case ValueError():
            return Failure(400, message, "invalid")
        case _:
            return Failure(500, f"internal error: {type(error).__name__}: {message}", "internal_error")


def _transfer_failure(error: TransferError, message: str) -> Failure:
    if error.field is None:
        return Failure(502, message, "handoff_failed")
    param = PARAMETERS.get(error.field, f"disaggregated_params.{error.field}")
    if error.field == "attempt":
        return Failure(409, message, "handoff_in_flight", param)
    return Failure(410 if error.gone else 400, message, "handoff_gone" if error.gone else "invalid", param)
