"""Whether bytes of processes that ended are still on their way into this process's TCP sockets.

What a process has sent survives it: in its orphaned socket's send queue, and in our receive queue. A transport that
reads such bytes later writes them to memory later, so a writer is harmless only once they are read.
"""

import os

from kvferry_backends.tcp_table import tcp_connections

_CLOSED_BY_PEER = frozenset({"07", "08"})
"""CLOSE and CLOSE_WAIT in ``/proc/net/tcp``."""


def orphaned_bytes() -> dict[str, int]:
    """Find what peers without a process have sent here and we have not read.

    Returns:
        Connection → bytes, at most. Only peers of this network namespace are seen.
    """
    connections = list(tcp_connections())
    mine = _own_inodes()
    # An orphan has no inode: its process is gone, the kernel still delivers what it had sent.
    orphans = {(each.remote, each.local): each.send_queue for each in connections if each.inode == 0}
    found = {}
    for each in connections:
        unsent = orphans.get((each.local, each.remote))
        if each.inode in mine and (unsent is not None or each.state in _CLOSED_BY_PEER):
            found[f"{each.local} {each.remote}"] = each.receive_queue + (unsent or 0)
    return {connection: nbytes for connection, nbytes in found.items() if nbytes}


def _own_inodes() -> set[int]:
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[len("socket:[") : -1]))
    return inodes
