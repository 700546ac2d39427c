"""Keeps UCX, which listens on every network device, to loopback where no peer is beyond it."""

import dataclasses
import os

from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

UCX_NET_DEVICES = "UCX_NET_DEVICES"
LOOPBACK_DEVICE = "lo"


def keep_nixl_on_loopback() -> None:
    """Tell the UCX inside NIXL, which reads nothing but its environment; what the operator set there stands.

    InfiniBand is left out with it: beside the system's libibverbs that module ends the process with a segmentation
    fault at exit (two copies of libnl; NIXL 1.5.1).
    """
    os.environ.setdefault(UCX_NET_DEVICES, LOOPBACK_DEVICE)
    os.environ.setdefault("UCX_MODULES", "^ib")


def take_loopback_option(spec: AgentSpec) -> tuple[AgentSpec, bool]:
    """Return the specification without ``LOOPBACK_ONLY``, which no transport knows, and what it said."""
    options = dict(spec.options)
    wanted = bool(options.pop(LOOPBACK_ONLY, False))
    return dataclasses.replace(spec, options=options), wanted
