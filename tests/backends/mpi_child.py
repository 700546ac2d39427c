"""An MPI agent in a process of its own, as ``agent_child.py`` has one of NIXL's."""

import sys

from agent_child import AgentChild, main

from kvferry_backends.mpi import create_transfer_agent
from kvferry_plugins.errors import BackendUnavailableError
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

OPTIONS = dict(option.split("=") for option in sys.argv[3:])


class MpiChild(AgentChild):
    def __init__(self, name, nbytes):
        super().__init__(name, nbytes)
        self.agent.set_active(True)

    def make_agent(self, name):
        options = OPTIONS | {LOOPBACK_ONLY: True}
        return create_transfer_agent(AgentSpec("MPI", name, "cpu", runtime="CPP", options=options))

    def make_another(self):
        self.make_agent("another").close()

    def unusable(self):
        return self.agent.unusable

    def set_active(self, active):
        self.agent.set_active(active)

    def cancel(self, transfer):
        return self.agent.cancel(transfer, "cancelled")

    def forget_memory(self):
        self.agent.deregister(self.registration)

    def close(self):
        self.agent.close()
        self.agent.close()


if __name__ == "__main__":
    try:
        main(MpiChild)
    except BackendUnavailableError as error:
        raise SystemExit(f"unavailable: {error}") from error
