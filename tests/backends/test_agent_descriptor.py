import zlib

import msgspec
import pytest

from kvferry_backends.agent_descriptor import AgentDescriptor, decode, encode
from kvferry_backends.process_identity import ProcessIdentity
from kvferry_plugins.errors import TransferError

DESCRIPTOR = AgentDescriptor(
    name="peer",
    transport="ucx",
    device="cpu",
    library="ucx 1",
    process=ProcessIdentity("boot", 1, 2, 3, 4),
    key=b"k" * 16,
    regions=((4096, 4096, 0, 0),),
    lanes=(b"lane",),
    backings=((3, 1, 2, 0),),
)


def test_what_was_packed_is_read():
    assert decode(encode(DESCRIPTOR), "ucx") == DESCRIPTOR


@pytest.mark.parametrize(
    "change",
    [
        {"regions": ((-1, 4096, 0, 0),)},
        {"regions": ((4096, -1, 0, 0),)},
        {"regions": ((4096, 1 << 63, 0, 0),)},
        {"regions": ((4096, 4096, 1 << 31, 0),)},
        {"backings": ((1 << 31, 1, 2, 0),)},
        {"backings": ((3, 1, 2, -1),)},
        {"backings": (None, None)},
        {"process": ProcessIdentity("boot", 1, 2, 0, 4)},
        {"process": ProcessIdentity("boot", 1, 2, 1 << 31, 4)},
        {"lanes": ()},
        {"key": b"short"},
    ],
    ids=str,
)
def test_a_descriptor_that_no_agent_makes_is_refused(change):
    with pytest.raises(TransferError, match="descriptor"):
        decode(encode(msgspec.structs.replace(DESCRIPTOR, **change)), "ucx")


def test_a_descriptor_with_a_field_too_few_is_refused():
    packed = msgspec.msgpack.encode({"name": "peer"})
    with pytest.raises(TransferError, match="missing required field"):
        decode(packed + zlib.crc32(packed).to_bytes(4, "little"), "ucx")
