"""The questions that kvferry asks its plugins: one function a hook, with when it is asked and what None means.

An implementation takes any subset of the arguments, by name. Values are collected from all plugins, then ranked:
injected over external over built-in; two of one rank that disagree are a ``PluginConflictError``. A hook that raises,
or answers outside its vocabulary, is a ``HookError`` that names the plugin.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from kvferry_plugins import PROJECT_NAME
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.transceiver import KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import (
    AgentSpec,
    ManagerKind,
    ManagerSpec,
    Plan,
    RuntimeName,
    TransceiverRuntime,
    TransceiverSpec,
    TransferBackend,
    TransferEvent,
)

_spec = pluggy.HookspecMarker(PROJECT_NAME)


@_spec
def preferred_transceiver_runtime(architecture: str, pretrained_config: Mapping[str, Any] | None) -> RuntimeName | None:
    """Asked while resolving, when ``transceiver_runtime`` is ``auto`` and a transceiver is on.

    Args:
        architecture: the *checkpoint's* architecture, exactly as its ``config.json`` names it first.
        pretrained_config: ``config.json`` as read, immutable; None when only a name is known.

    Returns:
        ``"PYTHON"``, ``"CPP"``, or None: no opinion.
    """


@_spec
def model_defaults(
    architecture: str, pretrained_config: Mapping[str, Any] | None, engine_args: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Asked while resolving, to fill what the user left open; ranked leaf key by leaf key.

    Args:
        architecture: the *execution* architecture (what the loader runs the checkpoint with).
        pretrained_config: as above.
        engine_args: what the user wrote, immutable.

    Returns:
        A nested mapping in the shape of the engine configuration, or None. The key ``cache_transceiver_config`` is
        refused: only the user turns disaggregation on.
    """


@_spec
def transfer_backends() -> Iterable[TransferBackend]:  # type: ignore[empty-body]
    """Asked while resolving: the transports that this plugin brings. Pure data; imports no transport."""


@_spec
def transceiver_runtimes() -> Iterable[TransceiverRuntime]:  # type: ignore[empty-body]
    """Asked while resolving: the transceiver implementations that this plugin brings. Pure data."""


@_spec
def kv_cache_managers() -> Iterable[ManagerKind]:  # type: ignore[empty-body]
    """Asked while resolving: the KV-cache managers that this plugin brings. Pure data."""


@_spec
def create_transceiver(spec: TransceiverSpec) -> KvCacheTransceiver | None:
    """Asked while building, of the one plugin that the plan names. None is a ``HookError``."""


@_spec
def create_transfer_agent(spec: AgentSpec) -> TransferAgent | None:
    """Asked while building, of the one plugin that the plan names; imports the transport's library here."""


@_spec
def create_kv_cache_manager(spec: ManagerSpec) -> KVCacheManager | None:
    """Asked while building, of the one plugin that the plan names."""


@_spec
def plan_resolved(plan: Plan) -> None:
    """Told once by ``build`` (not by ``explain``). An observer: it can raise or hang without changing a result."""


@_spec
def transfer_finished(event: TransferEvent) -> None:
    """Told the end of every transfer, off the transfer loop. An observer."""
