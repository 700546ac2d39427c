"""A Mooncake agent in a process of its own, as ``agent_child.py`` has one of NIXL's."""

import threading

from agent_child import AgentChild, main

from kvferry_backends.mooncake_agent import MooncakeAgent
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec


class MooncakeChild(AgentChild):
    def make_agent(self, name):
        return MooncakeAgent(AgentSpec("MOONCAKE", name, "cpu", runtime="CPP", options={LOOPBACK_ONLY: True}))

    def leaks(self):
        """Transfers that are not over, peers, and threads that post."""
        agent = self.agent
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("mooncake")]
        return [len(agent._transfers), len(agent._peers), len(threads)]


if __name__ == "__main__":
    main(MooncakeChild)
