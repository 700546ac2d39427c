"""What every check of a transceiver starts from: a pair, and the end of it at which nothing may be left."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import pytest

from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.testing.agents import ScriptedAgent, ScriptedHub
from kvferry_plugins.testing.block_agents import ScriptedBlockAgent
from kvferry_plugins.testing.conformance.transceiver_pair import Pair, Worker
from kvferry_plugins.testing.faults import Fault
from kvferry_plugins.testing.managers import FakeManager
from kvferry_plugins.transceiver import Capability, KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import AgentSpec, Role, TransceiverRuntime, TransceiverSpec

RunPair = Callable[..., Pair]

CLOCKS: Mapping[str, Any] = {
    "kv_transfer_timeout_ms": 60_000,
    "kv_transfer_admission_timeout_ms": 60_000,
    "kv_transfer_poll_interval_ms": 500,
}
"""Clocks that do not run out, unless a check says so."""


class TransceiverSuite:
    """How things are made; see ``TransceiverConformance``.

    Attributes:
        runtime: what the plugin declares.
        backend: the name that the specification gives.
        model: the identity that both sides have.
        patience: seconds after which what should have happened has not.
    """

    runtime: ClassVar[TransceiverRuntime]
    backend: ClassVar[str] = "SCRIPTED"
    model: ClassVar[Mapping[str, str]] = {"architecture": "FakeForCausalLM", "config": "c0", "weights": "w0"}
    patience: ClassVar[float] = 30.0

    _running: list[Worker]

    def make_transceiver(self, spec: TransceiverSpec) -> KvCacheTransceiver:
        """Return the transceiver under test."""
        raise NotImplementedError(f"{type(self).__name__} needs a method make_transceiver(spec)")

    def make_manager(self) -> KVCacheManager:
        """Return one side's manager."""
        return FakeManager()

    def make_agent(self, spec: AgentSpec, script: Iterable[Fault | None], hub: ScriptedHub) -> TransferAgent:
        """Return one side's agent; the writer's follows a script."""
        return ScriptedBlockAgent(spec.name, script, hub=hub)

    @pytest.fixture
    def run_pair(self) -> Iterator[RunPair]:
        """Start a pair: ``run_pair(*script, **config)``; it is shut down at the end, whatever became of it."""
        self._running = workers = list[Worker]()

        def run(*script: Fault | None, **config: Any) -> Pair:
            hub = ScriptedHub()
            for role in Role:
                workers.append(self._start(role, script if role is Role.CONTEXT else (), hub, {**CLOCKS, **config}))
            return Pair(workers[-2], workers[-1], self.patience)

        yield run
        for worker in workers:
            if isinstance(worker.agent, ScriptedAgent):
                worker.agent.release()
            with contextlib.suppress(Exception):  # a check has said so, or will
                worker.transceiver.shutdown()
            worker.manager.shutdown()

    def finish(self, pair: Pair) -> None:
        """Check that nothing is in flight, shut down, and check that nothing is left."""
        for worker in pair.workers:
            self._wait_until_idle(pair, worker)
        for worker in pair.workers:
            worker.transceiver.shutdown()
            assert worker.transceiver.memory_in_use is None, (
                f"nothing is in flight, and the {worker.role} worker says of its memory: "
                f"{worker.transceiver.memory_in_use}"
            )
            self._require_closed(worker)
            worker.manager.shutdown()
        self._running.clear()

    def can(self, capability: Capability, pair: Pair) -> bool:
        """Whether the transceiver says that it can do something."""
        return capability in pair.context.transceiver.capabilities

    def _start(self, role: Role, script: Iterable[Fault | None], hub: ScriptedHub, config: dict[str, Any]) -> Worker:
        made: list[TransferAgent] = []

        def create_agent(spec: AgentSpec) -> TransferAgent:
            made.append(self.make_agent(spec, script, hub))
            return made[0]

        manager = self.make_manager()
        spec = TransceiverSpec(
            role, self.runtime.name, self.backend, manager, create_agent, model=self.model, config=config
        )
        return Worker(role, manager, self.make_transceiver(spec), made[0])

    def _wait_until_idle(self, pair: Pair, worker: Worker) -> None:
        pair.wait(lambda: self._is_idle(worker), f"the {worker.role} worker keeps blocks that nobody has: a hold leaks")

    def _is_idle(self, worker: Worker) -> bool:
        worker.listen()
        for request_id in list(worker.requests):
            worker.manager.free(request_id)
            worker.requests.discard(request_id)
        return worker.in_use() == 0

    def _require_closed(self, worker: Worker) -> None:
        if isinstance(worker.agent, ScriptedAgent):
            assert worker.agent.closed, f"the {worker.role} worker was shut down, and its agent is still open"
