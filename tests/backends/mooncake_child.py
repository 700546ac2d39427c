"""A Mooncake agent in a process of its own, as ``agent_child.py`` has one of NIXL's."""

import os
import socket
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

    def devices(self):
        """Of each socket that listens: the network device it is bound to."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(name))) as borrowed:
                    if borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        device = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                        found.append(device.rstrip(b"\0").decode())
            except OSError:
                continue
        return found


if __name__ == "__main__":
    main(MooncakeChild)
