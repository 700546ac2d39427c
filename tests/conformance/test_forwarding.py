"""Wrappers that hand everything on pass; one that forgets is refused, by the kit and by kvferry when it is made."""

import contextlib
import re

import pytest

from kvferry.bench.timed_agent import TimedAgent, TimedBlockAgent
from kvferry.testing import isolated_registry
from kvferry_plugins import hookimpl
from kvferry_plugins.errors import HookError
from kvferry_plugins.forwarding import forgotten, forwarding_fault, wrapped_by
from kvferry_plugins.testing import ScriptedAgent
from kvferry_plugins.testing.conformance import ForwardingConformance, check_forwards
from kvferry_plugins.transceiver import BlockTransferAgent, TransferAgent
from kvferry_plugins.types import AgentSpec


class TestTimedAgent(ForwardingConformance):
    contract = TransferAgent

    def wrap(self, wrapped):
        return TimedAgent(wrapped)


class TestTimedBlockAgent(ForwardingConformance):
    contract = BlockTransferAgent

    def wrap(self, wrapped):
        return TimedBlockAgent(wrapped)


class Routed(ScriptedAgent):
    """Answers what the contract has a default for."""

    library = "routed 1.0"

    @property
    def unusable(self):
        return "its card is gone"

    def route(self, peer):
        return "by the wire"


class Forgetful(TransferAgent):
    """Hands on what is abstract, and leaves the rest to the contract."""

    def __init__(self, agent):
        self.inner = agent

    def __getattr__(self, name):
        return getattr(self.inner, name)


def hand_on(name):
    return lambda self, *arguments: getattr(self.inner, name)(*arguments)


for each in TransferAgent.__abstractmethods__:
    setattr(Forgetful, each, hand_on(each))
Forgetful.__abstractmethods__ = frozenset()


class Maker:
    name = "acme"

    def __init__(self, agent):
        self.agent = agent

    @hookimpl
    def create_transfer_agent(self):
        return self.agent


def make(agent):
    registry = isolated_registry(Maker(agent), builtin=False)
    return registry.create_transfer_agent("acme", AgentSpec("ACME", "a", "cpu"))


def test_what_a_wrapper_left_to_the_contract_is_named():
    agent = Routed()
    assert forgotten(Forgetful(agent), agent) == ("library", "route", "unusable")
    with pytest.raises(AssertionError, match="Forgetful wraps Routed and does not hand on library, route, unusable"):
        check_forwards(Forgetful(agent), agent)


def test_kvferry_refuses_it_when_it_is_made_and_names_the_plugin_and_what_to_do():
    agent = Routed()
    with pytest.raises(HookError, match=r"plugin 'acme' \(\(injected\)\).* does not hand on library, route") as caught:
        make(Forgetful(agent))
    assert "set its attribute `wraps` to ()" in str(caught.value)
    assert (caught.value.hook, caught.value.plugin) == ("create_transfer_agent", "acme")
    assert agent.closed, "what is refused is ended"


def test_what_the_wrapped_object_leaves_to_the_contract_the_wrapper_may_leave_too():
    agent = ScriptedAgent()
    assert make(wrapper := Forgetful(agent)) is wrapper
    agent.close()


def test_an_agent_that_takes_block_lists_is_not_wrapped_by_one_that_does_not():
    class BlockAgent(ScriptedAgent, BlockTransferAgent):
        block_map = submit_blocks = cancel = progress_bytes = hand_on("library")

    fault = forwarding_fault(TimedAgent(BlockAgent()))
    assert "TimedAgent, which wraps BlockAgent and does not hand on block_map, cancel, progress_bytes" in fault


def test_a_wrapper_of_several_is_held_to_each():
    class Both(Forgetful):
        def __init__(self, *agents):
            super().__init__(agents[0])
            self.all = {"first": agents[0], "second": agents[1]}

    plain, routed = ScriptedAgent(), Routed()
    assert wrapped_by(Both(plain, routed)) == (plain, routed)
    assert "which wraps Routed" in forwarding_fault(Both(plain, routed))


def test_what_a_wrapper_wraps_it_may_say_itself():
    class Hidden(Forgetful):
        def __init__(self, agent):
            self.state = [[agent]]

        @property
        def wraps(self):
            return self.state[0][0]

    class Friend(Forgetful):
        wraps = ()

    agent = Routed()
    assert wrapped_by(Hidden(agent)) == (agent,)
    assert forwarding_fault(Hidden(agent)) is not None
    assert forwarding_fault(Friend(agent)) is None


def test_what_is_no_object_of_the_contract_wraps_nothing():
    assert wrapped_by("text") == ()


# --- faults planted in a wrapper -----------------------------------------------------------------------------------


class CutsShort(TimedBlockAgent):
    def cancel(self, transfer, reason="cancelled"):
        return self._block_agent.cancel(transfer)


class Silent(TimedAgent):
    def fence(self, peer):
        self._agent.fence(peer)


class Swallows(TimedAgent):
    def set_active(self, active):
        with contextlib.suppress(Exception):
            self._agent.set_active(active)


class Twice(TimedAgent):
    def deregister(self, registration):
        self._agent.deregister(registration)
        self._agent.deregister(registration)


class Stale(TimedAgent):
    unusable = None

    def __init__(self, agent):
        super().__init__(agent)
        self.unusable = agent.unusable


CALL, ERROR = "test_a_call_is_handed_on_as_it_was_made", "test_an_error_comes_through"


@pytest.mark.parametrize(
    ("kind", "contract", "check", "arguments", "message"),
    [
        (
            CutsShort,
            BlockTransferAgent,
            CALL,
            ("cancel", True),
            "CutsShort.cancel handed on reason='cancelled' instead",
        ),
        (Silent, TransferAgent, CALL, ("fence", True), "Silent.fence returned None instead of the wrapped object's"),
        (Twice, TransferAgent, CALL, ("deregister", True), "deregister called the wrapped object's deregister 2 times"),
        (Swallows, TransferAgent, ERROR, ("set_active",), "Swallows.set_active raised None where the wrapped"),
        (
            Stale,
            TransferAgent,
            "test_an_attribute_is_the_wrapped_objects",
            ("unusable",),
            "Stale.unusable is <answer of",
        ),
        (Forgetful, TransferAgent, "test_kvferry_finds_what_it_wraps_and_misses_nothing", (), "hand on library, route"),
    ],
    ids=["argument", "answer", "twice", "error", "stale attribute", "forgotten"],
)
def test_the_kit_finds_what_is_wrong_with_a_wrapper(kind, contract, check, arguments, message):
    class Suite(ForwardingConformance):
        def wrap(self, wrapped):
            return kind(wrapped)

    Suite.contract = contract
    with pytest.raises(AssertionError, match=re.escape(message)):
        getattr(Suite(), check)(*arguments)
