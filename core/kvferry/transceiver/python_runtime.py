"""``KvCacheTransceiverV2``: plans and posts in Python, over any transfer agent."""

from kvferry.transceiver.session_transceiver import SessionTransceiver
from kvferry.transceiver.writers import PieceWriter
from kvferry_plugins.types import TransceiverSpec


class KvCacheTransceiverV2(SessionTransceiver):
    """The PYTHON runtime. Raises what ``SessionTransceiver`` raises."""

    def __init__(self, spec: TransceiverSpec) -> None:
        super().__init__(spec, PieceWriter)
