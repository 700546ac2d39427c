import msgspec
import pytest

from kvferry.serving.first_token import pack_first_token, unpack_first_token
from kvferry_plugins.errors import TransferError


@pytest.mark.parametrize("ended", [False, True])
def test_what_is_packed_is_unpacked(ended):
    first = unpack_first_token(pack_first_token(4711, sampled=1, ended=ended))
    assert (first.token, first.sampled, first.ended) == (4711, 1, ended)


def test_a_later_version_may_say_more():
    aux = msgspec.msgpack.encode([2, 4711, 1, False, "something new"])
    assert unpack_first_token(aux).token == 4711


@pytest.mark.parametrize(
    "aux",
    [b"", b"\xc1", b"\xa1x", msgspec.msgpack.encode([1, -1, 1, False]), pack_first_token(1, sampled=2, ended=False)],
)
def test_what_cannot_be_gone_on_from_is_a_transfer_error(aux):
    with pytest.raises(TransferError):
        unpack_first_token(aux)
