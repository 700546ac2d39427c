"""The PYTHON runtime behind a wrapper that has one fault, or none: ``make(fault)(spec)``."""

import threading
import time
from dataclasses import replace

from kvferry.transceiver.plugin_python import create_transceiver, transceiver_runtimes
from kvferry_plugins.transceiver import Capability, KvCacheTransceiver
from kvferry_plugins.types import TransferStatus

RUNTIME = transceiver_runtimes()[0]


class Faithful(KvCacheTransceiver):
    """Hands everything on."""

    def __init__(self, spec):
        self.spec = spec
        self.inner = create_transceiver(spec)
        self.kv_transfer_timeout_ms = self.inner.kv_transfer_timeout_ms

    unusable = property(lambda self: self.inner.unusable)
    memory_in_use = property(lambda self: self.inner.memory_in_use)
    capabilities = property(lambda self: self.inner.capabilities)

    def stalled(self, seconds):
        return self.inner.stalled(seconds)

    def prepare_context_requests(self, requests):
        self.inner.prepare_context_requests(requests)

    def respond_and_send_async(self, request, computed_tokens=None, last=True):
        self.inner.respond_and_send_async(request, computed_tokens, last)

    def request_and_receive_async(self, request):
        self.inner.request_and_receive_async(request)

    def request_and_receive_sync(self, request):
        self.inner.request_and_receive_sync(request)

    def check_context_transfer_status(self, at_least=0):
        return self.inner.check_context_transfer_status(at_least)

    def check_gen_transfer_status(self, at_least=0):
        return self.inner.check_gen_transfer_status(at_least)

    def check_gen_transfer_complete(self):
        return self.inner.check_gen_transfer_complete()

    def has_inflight_transfer(self, request):
        return self.inner.has_inflight_transfer(request)

    def cancel_request(self, request, reason=""):
        return self.inner.cancel_request(request, reason)

    def commit_blocks_for_reuse(self, request):
        self.inner.commit_blocks_for_reuse(request)

    def get_disaggregated_params(self, request):
        return self.inner.get_disaggregated_params(request)

    def status_dump(self):
        return self.inner.status_dump()

    def shutdown(self):
        self.inner.shutdown()


class TellsTwice(Faithful):
    last = TransferStatus()

    def check_gen_transfer_status(self, at_least=0):
        found = self.inner.check_gen_transfer_status(at_least)
        again, self.last = self.last, found
        return found if found.events else again


class Waits(Faithful):
    def check_gen_transfer_status(self, at_least=0):
        return self.inner.check_gen_transfer_status(max(1, at_least))


class NeverWaits(Faithful):
    def check_gen_transfer_status(self, at_least=0):
        return self.inner.check_gen_transfer_status(0)


class WaitsForEver(Faithful):
    def check_context_transfer_status(self, at_least=0):
        found = self.inner.check_context_transfer_status(at_least)
        while at_least and not found.events:
            found = self.inner.check_context_transfer_status(at_least)
        return found


class SendsAtOnce(Faithful):
    """Returns when the bytes have left."""

    def respond_and_send_async(self, request, computed_tokens=None, last=True):
        super().respond_and_send_async(request, computed_tokens, last)
        while self.inner.has_inflight_transfer(request):
            time.sleep(0.01)


class KnowsNoRequest(Faithful):
    """Is asked of one request and answers for all."""

    def has_inflight_transfer(self, request):
        return not self.inner.check_gen_transfer_complete() or bool(self.inner.status_dump()["sends"])


class KeepsReasons(Faithful):
    def cancel_request(self, request, reason=""):
        return self.inner.cancel_request(request)


class SaysCompleteEarly(Faithful):
    """Believes that what was posted has arrived."""

    def check_context_transfer_status(self, at_least=0):
        found = self.inner.check_context_transfer_status(at_least)
        sends = self.inner.status_dump()["sends"]
        posted = [each for each in self.inner._sends if any(send["state"] == "posting" for send in sends)]
        if found.events or not posted:
            return found
        return fake_end(posted[0])


def fake_end(request_id):
    from kvferry_plugins.types import Role, TransferEvent

    event = TransferEvent(request_id, Role.CONTEXT, "completed", "", 0, 0, 0.0, 0.0)
    return TransferStatus(completed=(request_id,), events=(event,))


class FreesEarly(Faithful):
    def cancel_request(self, request, reason=""):
        self.inner.cancel_request(request, reason)
        return True


class HidesFailures(Faithful):
    def check_context_transfer_status(self, at_least=0):
        found = self.inner.check_context_transfer_status(at_least)
        events = tuple(each for each in found.events if each.outcome != "failed")
        return replace(found, failed=(), events=events)


class KeepsHolds(Faithful):
    def respond_and_send_async(self, request, computed_tokens=None, last=True):
        self.spec.manager.hold(self.spec.manager.block_table(request.request_id))
        super().respond_and_send_async(request, computed_tokens, last)


class LeavesAThread(Faithful):
    def shutdown(self):
        super().shutdown()
        threading.Thread(target=time.sleep, args=(60,), name="bad-heartbeat", daemon=True).start()


class EndsOnce(Faithful):
    ended = False

    def shutdown(self):
        if self.ended:
            raise RuntimeError("the loop is not running")
        self.ended = True
        super().shutdown()


class Boasts(Faithful):
    @property
    def capabilities(self):
        return self.inner.capabilities - {Capability.TIMING}


class CollectsChunks(Faithful):
    def respond_and_send_async(self, request, computed_tokens=None, last=True):
        if last:
            super().respond_and_send_async(request)


class DumpsObjects(Faithful):
    def status_dump(self):
        return {**self.inner.status_dump(), "manager": self.spec.manager}


class SaysMemoryIsFree(Faithful):
    memory_in_use = None


class TrustsAnybody(Faithful):
    def request_and_receive_async(self, request):
        try:
            super().request_and_receive_async(request)
        except Exception:
            self.refused = request


class Scribbles(Faithful):
    """Writes behind the prompt's last block."""

    def check_gen_transfer_status(self, at_least=0):
        found = self.inner.check_gen_transfer_status(at_least)
        if found.completed:
            self.spec.manager.memory[-1] = 1.0
        return found


class LosesABlock(Faithful):
    def check_gen_transfer_status(self, at_least=0):
        found = self.inner.check_gen_transfer_status(at_least)
        for request_id in found.completed:
            self.spec.manager.memory[self.spec.manager.block_table(request_id)[0][0]] = 0.0
        return found


class AcceptsAfterTheEnd(Faithful):
    def get_disaggregated_params(self, request):
        try:
            return super().get_disaggregated_params(request)
        except Exception:
            return None


FAULTS = {
    "tells each end twice": TellsTwice,
    "waits when it is only asked": Waits,
    "does not wait when it is told to": NeverWaits,
    "waits for ever": WaitsForEver,
    "sends before it returns": SendsAtOnce,
    "answers for all requests": KnowsNoRequest,
    "keeps its reasons": KeepsReasons,
    "says complete before it is": SaysCompleteEarly,
    "gives blocks back too early": FreesEarly,
    "hides failures": HidesFailures,
    "keeps holds": KeepsHolds,
    "leaves a thread": LeavesAThread,
    "ends only once": EndsOnce,
    "declares other than it has": Boasts,
    "collects chunks": CollectsChunks,
    "dumps objects": DumpsObjects,
    "says that memory is free": SaysMemoryIsFree,
    "trusts anybody": TrustsAnybody,
    "scribbles": Scribbles,
    "loses a block": LosesABlock,
    "accepts after the end": AcceptsAfterTheEnd,
}
