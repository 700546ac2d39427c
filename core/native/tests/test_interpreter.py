import ctypes
import sys

import numpy as np
import pytest

from kvferry_native import BlockMap, Engine, transport_path

HOLD = ctypes.PyDLL(None).usleep
"""Sleeps without letting the interpreter go."""


@pytest.fixture
def patient_interpreter():
    """A thread that waits for the GIL gets it only where it is let go."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def test_transfers_go_on_while_the_interpreter_is_held(patient_interpreter):
    source, target = np.arange(64 << 10, dtype=np.uint8), np.zeros(64 << 10, dtype=np.uint8)
    writer, reader = (Engine(str(transport_path("ucx"))) for _ in range(2))
    for engine, memory in ((writer, source), (reader, target)):
        engine.register_memory([(memory.ctypes.data, memory.nbytes, 0, 0)])
    reader.set_active(True)
    peer = writer.connect(reader.descriptor())
    blocks = BlockMap([(source.ctypes.data, 4096, 16, target.ctypes.data, 4096, 16, [(0, 0, 4096)])])
    for block in range(16):
        each = np.array([block], dtype=np.int32)
        writer.submit_blocks(peer, blocks, each, each)
    HOLD(500_000)
    completions = writer.collect()
    writer.close()
    reader.close()
    assert [ok for _, ok, *_ in completions] == [True] * 16
    assert np.array_equal(source, target)
