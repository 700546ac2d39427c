"""From a ``TransceiverSpec`` to the parts that both sides share: sockets, agent, registered memory, fingerprint."""

import importlib.metadata
import time
import uuid
from collections.abc import Callable, Mapping

from kvferry.transceiver.channel import Channel
from kvferry.transceiver.fingerprint import Fingerprint, make_fingerprint
from kvferry.transceiver.keys import load_or_make_key
from kvferry.transceiver.ledger import Ledger
from kvferry.transceiver.shared import Clocks, Shared
from kvferry.transceiver.writers import Writer
from kvferry_plugins.transceiver import Region, RegistrationId, TransferAgent
from kvferry_plugins.types import LOOPBACK_ONLY, AgentSpec, TransceiverSpec


def open_shared(
    spec: TransceiverSpec, make_writer: Callable[[TransferAgent], Writer], options: Mapping[str, object]
) -> tuple[Shared, RegistrationId]:
    """Bind the control socket, make the agent and register the manager's pools; all or nothing.

    Args:
        spec: what to build from.
        make_writer: how blocks become writes that the agent posts.
        options: of the runtime, for the agent.

    Raises:
        ConfigError: the control socket cannot be bound, or the key file cannot be used.
        BackendUnavailableError: from the agent's maker, or from ``make_writer``.
        TransferError: the pools cannot be registered.
    """
    instance = uuid.uuid4().hex
    bind = spec.bind if spec.ranks is None or spec.ranks.rank else spec.ranks.rendezvous
    channel = Channel(bind, instance, load_or_make_key(), spec.peers)
    try:
        all_options = {LOOPBACK_ONLY: not spec.peers, **options}
        agent = spec.create_agent(AgentSpec(spec.backend, instance, spec.device, all_options, spec.runtime))
        try:
            pools = spec.manager.layout.pools
            registration = agent.register([Region(pool.base, pool.nbytes, pool.device) for pool in pools])
            return _share(spec, instance, channel, agent, make_writer(agent)), registration
        except BaseException:
            agent.close()
            raise
    except BaseException:
        channel.close()
        raise


def _share(spec: TransceiverSpec, instance: str, channel: Channel, agent: TransferAgent, writer: Writer) -> Shared:
    return Shared(
        role=spec.role,
        instance=instance,
        incarnation=time.time_ns(),
        layout=spec.manager.layout,
        agent=agent,
        writer=writer,
        channel=channel,
        ledger=Ledger(spec.manager),
        fingerprint=_fingerprint(spec, agent),
        clocks=_clocks(spec),
        checksum=bool(spec.config.get("kv_transfer_checksum", False)),
        on_event=spec.on_event,
    )


def _fingerprint(spec: TransceiverSpec, agent: TransferAgent) -> Fingerprint:
    return make_fingerprint(
        backend=spec.backend,
        runtime=spec.runtime,
        layout=spec.manager.layout,
        model=spec.model,
        checksum=bool(spec.config.get("kv_transfer_checksum", False)),
        libraries={"kvferry": importlib.metadata.version("kvferry"), spec.backend: agent.library},
        plugins=spec.plugins,
        plugin_digests=spec.plugin_digests,
        locked=spec.locked,
        is_stage=spec.ranks is not None and spec.ranks.topology.pipeline > 1,
    )


def _clocks(spec: TransceiverSpec) -> Clocks:
    transfer_ms = spec.config.get("kv_transfer_timeout_ms", 60_000)
    return Clocks(
        admission=spec.config.get("kv_transfer_admission_timeout_ms", 60_000) / 1000,
        transfer=transfer_ms / 1000 if transfer_ms is not None else None,
        poll_interval=(spec.config.get("kv_transfer_poll_interval_ms") or 5_000) / 1000,
    )
