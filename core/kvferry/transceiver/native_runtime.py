"""``KvCacheTransceiverCpp``: the protocol in Python, the bytes in native threads that never wait for the GIL."""

from kvferry.transceiver.native_options import native_options
from kvferry.transceiver.session_transceiver import SessionTransceiver
from kvferry.transceiver.writers import BlockListWriter, Writer
from kvferry_plugins.errors import BackendUnavailableError
from kvferry_plugins.transceiver import BlockTransferAgent, TransferAgent
from kvferry_plugins.types import TransceiverSpec


class KvCacheTransceiverCpp(SessionTransceiver):
    """The CPP runtime: the agent plans, packs, posts and completes whole block lists by itself.

    Raises:
        ConfigError: ``max_tokens_in_buffer`` holds no block, or does not fit memory; or as ``SessionTransceiver``.
        BackendUnavailableError: the backend's agent takes no block lists; or as ``SessionTransceiver``.
    """

    def __init__(self, spec: TransceiverSpec) -> None:
        options = native_options(spec.config, spec.manager.layout, spec.role)
        super().__init__(spec, lambda agent: _block_list_writer(spec.backend, agent), options)


def _block_list_writer(backend: str, agent: TransferAgent) -> Writer:
    if not isinstance(agent, BlockTransferAgent):
        raise BackendUnavailableError(
            f"runtime CPP cannot drive backend {backend}: its {type(agent).__name__} takes no block lists; "
            "set cache_transceiver_config.transceiver_runtime to PYTHON"
        )
    return BlockListWriter(agent)
