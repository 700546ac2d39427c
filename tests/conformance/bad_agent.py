"""A deliberately bad backend: the toy one of ``examples/``, with one fault planted by name.

Run as a suite of its own (``test_planted_faults.py`` does): one class a fault, and one without.
"""

import contextlib
import ctypes
import os
import select
import threading
import time

import numpy as np
from toytcp_kvferry.agent import ToyTcpAgent

from kvferry_plugins.errors import TransferError
from kvferry_plugins.testing.conformance.agents import TransferAgentConformance
from kvferry_plugins.transceiver import Completion, Fence
from kvferry_plugins.types import AgentSpec


class EarlyCompletion(ToyTcpAgent):
    """Says ok as soon as the bytes have left, not when they are at the target."""

    def __init__(self, spec):
        super().__init__(spec)
        self._bell = os.eventfd(0)  # the sockets may have nothing to say while the target reads nothing
        self._epoll.register(self._bell, select.EPOLLIN)

    def submit(self, peer, src, dst, nbytes):
        transfer = super().submit(peer, src, dst, nbytes)
        self._ended.append(Completion(transfer, ok=True))
        self._peers[peer].in_flight.discard(transfer)
        os.eventfd_write(self._bell, 1)
        return transfer


class DoubleCompletion(ToyTcpAgent):
    """Reports every transfer again at the next poll."""

    before = ()

    def poll(self):
        again, self.before = self.before, super().poll()
        return [*again, *self.before]


class LostCompletion(ToyTcpAgent):
    """Never reports each 13th transfer."""

    def poll(self):
        return [each for each in super().poll() if each.id % 13]


class BlockingSubmit(ToyTcpAgent):
    """Waits in ``submit`` for the target's answer."""

    def submit(self, peer, src, dst, nbytes):
        transfer = super().submit(peer, src, dst, nbytes)
        kept = []
        while not any(each.id == transfer for each in kept):
            kept += ToyTcpAgent.poll(self)
            time.sleep(1e-4)
        self._ended = kept
        return transfer


class HalfPosted(ToyTcpAgent):
    """Posts the segments one by one, and raises at the first that is not registered."""

    def submit(self, peer, src, dst, nbytes):
        if len(src) > 8 or len(src) < 2:
            return super().submit(peer, src, dst, nbytes)
        parts = [super(HalfPosted, self).submit(peer, *row) for row in np.stack([src, dst, nbytes], axis=1)[..., None]]
        for part in parts[:-1]:
            self._peers[peer].in_flight.discard(part)
        return parts[-1]


class UnregisteredWrites(ToyTcpAgent):
    """Writes wherever the writer says, registered or not, as long as it is nearby."""

    def __init__(self, spec):
        super().__init__(spec)
        self._memory.find = self._find

    def _find(self, address, nbytes):
        near = [base for views in self._memory._views.values() for base, _ in views]
        if not any(abs(address - base) < 8 << 20 for base in near) or nbytes < 0:
            raise TransferError(f"{nbytes} bytes at {address:#x} are not registered")
        return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class LostTail(ToyTcpAgent):
    """Moves whole words of eight bytes, and forgets the rest of a segment."""

    def submit(self, peer, src, dst, nbytes):
        return super().submit(peer, src, dst, np.asarray(nbytes, dtype=np.int64) // 8 * 8)


class SpinningThread(ToyTcpAgent):
    """Has a progress thread that never sleeps."""

    def __init__(self, spec):
        super().__init__(spec)
        self._thread = threading.Thread(target=self._spin, name="acme-progress", daemon=True)
        self._thread.start()

    def _spin(self):
        while not self._epoll.closed:
            pass


class LeakedDescriptors(ToyTcpAgent):
    """Leaves a descriptor open for every agent that was closed."""

    def close(self):
        if not self._epoll.closed:
            os.dup(self._listener.fileno())
        super().close()


class SilentDescriptor(ToyTcpAgent):
    """Gives a wake-up descriptor that never turns readable."""

    def __init__(self, spec):
        super().__init__(spec)
        self._silent = os.eventfd(0)

    def wakeup_fd(self):
        return self._silent

    def close(self):
        super().close()
        with contextlib.suppress(OSError):
            os.close(self._silent)


class HastyFence(ToyTcpAgent):
    """Calls a writer fenced that has been quiet, although it lives."""

    def fence(self, peer):
        self._peer(peer)
        return Fence.FENCED


class NeverFenced(ToyTcpAgent):
    """Never knows that a process is gone: neither its blocks nor its transfers come back."""

    def fence(self, peer):
        self._peer(peer)
        return Fence.IN_DOUBT


class KeptTransfers(ToyTcpAgent):
    """Keeps the segments of every transfer for ever."""

    def __init__(self, spec):
        super().__init__(spec)
        self._history = []

    def submit(self, peer, src, dst, nbytes):
        self._history.append([np.array(each) for each in (src, dst, nbytes)])
        return super().submit(peer, src, dst, nbytes)


class ForeignErrors(ToyTcpAgent):
    """Raises what its library raises."""

    def connect(self, descriptor):
        try:
            return super().connect(descriptor)
        except TransferError as error:
            raise ValueError(str(error)) from error


class CloseOnce(ToyTcpAgent):
    """Cannot be closed twice."""

    def close(self):
        self._epoll.fileno()
        super().close()


class AnotherDescriptor(ToyTcpAgent):
    """Gives a new wake-up descriptor whenever it is asked, which nobody closes."""

    def wakeup_fd(self):
        return os.dup(super().wakeup_fd())


class RefusesAfterClose(ToyTcpAgent):
    """Is asked to forget what it has forgotten, and complains."""

    def deregister(self, registration):
        if self._epoll.closed:
            raise TransferError("this agent is closed")
        super().deregister(registration)


class _Suite(TransferAgentConformance):
    agent = ToyTcpAgent

    def make_agent(self, name):
        return self.agent(AgentSpec("TOYTCP", name, "cpu"))


for _kind in (ToyTcpAgent, *ToyTcpAgent.__subclasses__()):
    _name = f"Test{_kind.__name__}"
    _patience = {} if _kind is ToyTcpAgent else {"patience": 4.0}
    globals()[_name] = type(_name, (_Suite,), {"agent": _kind, "__module__": __name__, **_patience})
