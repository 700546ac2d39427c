import inspect

import pytest

from kvferry.bench.timed_agent import TimedAgent, TimedBlockAgent, timed
from kvferry_plugins.testing import ScriptedAgent
from kvferry_plugins.transceiver import BlockTransferAgent, TransferAgent


class BlockListAgent(ScriptedAgent, BlockTransferAgent):
    """Answers each call with its name and arguments."""

    def block_map(self, copy):
        return ("block_map", copy)

    def submit_blocks(self, peer, block_map, src, dst):
        return ("submit_blocks", peer, block_map, src, dst)

    def cancel(self, transfer, reason="cancelled"):
        return ("cancel", transfer, reason)

    def progress_bytes(self, transfer):
        return ("progress_bytes", transfer)

    def set_active(self, active):
        self.active = active


@pytest.mark.parametrize(("contract", "wrapper"), [(TransferAgent, TimedAgent), (BlockTransferAgent, TimedBlockAgent)])
def test_every_method_of_the_contract_is_handed_on(contract, wrapper):
    ours = [base for base in wrapper.__mro__ if base not in (*contract.__mro__, TransferAgent)]
    own = {name for base in ours for name in vars(base)}
    public = {name for name, _ in inspect.getmembers(contract, inspect.isfunction) if not name.startswith("_")}
    assert len(public) >= 11
    assert public <= own


def test_an_agent_is_wrapped_by_one_of_its_own_kind():
    assert isinstance(timed(BlockListAgent()), BlockTransferAgent)
    assert not isinstance(timed(ScriptedAgent()), BlockTransferAgent)


def test_block_lists_are_handed_on_and_timed():
    agent = BlockListAgent()
    wrapped = timed(agent)
    assert wrapped.block_map("copy") == ("block_map", "copy")
    assert wrapped.submit_blocks(7, "map", [1], [2]) == ("submit_blocks", 7, "map", [1], [2])
    assert wrapped.cancel(3, "enough") == ("cancel", 3, "enough")
    assert wrapped.progress_bytes(3) == ("progress_bytes", 3)
    wrapped.set_active(True)
    assert agent.active
    assert wrapped.take_figures()["posting"] > 0
    assert wrapped.take_figures()["posting"] == 0


def test_it_tells_the_library_of_the_agent():
    agent = ScriptedAgent()
    assert timed(agent).library == agent.library
