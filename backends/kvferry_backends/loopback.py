"""Keeps UCX, which listens on every network device, to loopback where no peer is beyond it."""

import dataclasses
import os
from pathlib import Path

from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

UCX_NET_DEVICES = "UCX_NET_DEVICES"
LOOPBACK_DEVICE = "lo"

_UCX_MODULES = "UCX_MODULES"
_NO_INFINIBAND = "^ib"
_INFINIBAND_DEVICES = Path("/sys/class/infiniband")


def keep_nixl_on_loopback() -> None:
    """Tell the UCX inside NIXL, which reads nothing but its environment; what the operator set there stands."""
    os.environ.setdefault(UCX_NET_DEVICES, LOOPBACK_DEVICE)
    os.environ.setdefault(_UCX_MODULES, _NO_INFINIBAND)


def leave_out_infiniband_where_there_is_none() -> None:
    """Tell the UCX inside NIXL the same where the machine has no such device.

    Beside the system's libibverbs that module ends the process with a segmentation fault at exit (two copies of libnl;
    NIXL 1.5.1).
    """
    if not _INFINIBAND_DEVICES.is_dir():
        os.environ.setdefault(_UCX_MODULES, _NO_INFINIBAND)


def take_loopback_option(spec: AgentSpec) -> tuple[AgentSpec, bool]:
    """Return the specification without ``LOOPBACK_ONLY``, which no transport knows, and what it said."""
    options = dict(spec.options)
    wanted = bool(options.pop(LOOPBACK_ONLY, False))
    return dataclasses.replace(spec, options=options), wanted
