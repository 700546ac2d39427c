"""The NIXL library as our process wants it: quiet on stdout, without its progress thread, over UCX."""

import importlib.metadata
import logging
import os
import sys
from typing import Any

from kvferry_backends.loopback import keep_nixl_on_loopback, leave_out_infiniband_where_there_is_none
from kvferry_plugins.errors import BackendUnavailableError

TRANSPORT = "UCX"
"""The NIXL plugin that moves the bytes."""


def library_version() -> str:
    """Name and version, as compared in the handshake."""
    return f"nixl {importlib.metadata.version('nixl')}"


def make_agent(name: str, *, progress_thread: bool = False, loopback_only: bool = False) -> Any:
    """Make a ``nixl_agent``. Its progress thread would spin a whole core for the life of the process.

    Args:
        name: unique among the peers.
        progress_thread: whether NIXL progresses by itself.
        loopback_only: whether UCX, which listens on every network device, is to use none but loopback. What the
            operator set in ``UCX_NET_DEVICES`` stands.

    Raises:
        BackendUnavailableError: NIXL is not installed, or its UCX plugin does not start here.
    """
    if loopback_only:
        keep_nixl_on_loopback()
    leave_out_infiniband_where_there_is_none()
    api = _import_api()
    config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[TRANSPORT])
    try:
        agent = api.nixl_agent(name, config)
    except Exception as error:
        raise BackendUnavailableError(f"NIXL's {TRANSPORT} plugin does not start ({error}); {_advice()}") from error
    if TRANSPORT not in agent.backends:
        raise BackendUnavailableError(
            f"this NIXL has no {TRANSPORT} plugin, only {agent.get_plugin_list()}; {_advice()}"
        )
    return agent


def _import_api() -> Any:
    # From its import on NIXL logs at INFO, to stdout, and hides errors of everybody's log handlers. Not in our host.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # UCX, too, logs to stdout: in the midst of a JSON object
    raise_exceptions = logging.raiseExceptions
    try:
        import nixl._api as api
    except ImportError as error:
        raise BackendUnavailableError(
            f"NIXL cannot be imported ({error}); install it with: pip install 'kvferry[nixl]'"
        ) from error
    finally:
        logging.raiseExceptions = raise_exceptions
    for handler in logging.getLogger("nixl").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    return api


def _advice() -> str:
    transports = os.environ.get("UCX_TLS")
    if transports is not None:
        return f"UCX_TLS={transports!r}: add tcp and self to it, or unset it"
    return "run it with UCX_LOG_LEVEL=info to see why"
