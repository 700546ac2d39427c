from kvferry.bench.timed_agent import timed
from kvferry_plugins.testing import ScriptedAgent
from kvferry_plugins.transceiver import BlockTransferAgent


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
