"""Keeps UCX, which listens on every network device, to loopback where no peer is beyond it."""

import dataclasses
import os

from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec

UCX_NET_DEVICES = "UCX_NET_DEVICES"
"""What the operator set in it stands."""

LOOPBACK_DEVICE = "lo"


def without_loopback_option(spec: AgentSpec) -> tuple[AgentSpec, bool]:
    """Take ``LOOPBACK_ONLY`` out of the options; whether UCX is still to be told."""
    options = dict(spec.options)
    wanted = bool(options.pop(LOOPBACK_ONLY, False))
    return dataclasses.replace(spec, options=options), wanted and UCX_NET_DEVICES not in os.environ
