"""The native agent over MPI; it logs when the other worker of its world is gone, since nobody can replace it."""

import logging
import os
import threading
from collections.abc import Mapping
from typing import Final

from kvferry_backends.loopback import take_loopback_option
from kvferry_backends.mpi_mate import Mate
from kvferry_backends.native_agent import NativeAgent
from kvferry_plugins.transceiver import Completion, Fence, PeerId
from kvferry_plugins.types import AgentSpec

SETTINGS: Final[Mapping[str, str]] = {
    # Nothing of UCX or libfabric: they would listen, and UCX's own transports tolerate no failure.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
    # Scattered memory is copied by both processes, through shared memory, in fragments of this size: with 32 KiB, the
    # default, that is a third slower. What is contiguous the target copies alone (CMA), where the kernel lets it.
    "OMPI_MCA_btl_sm_max_send_size": str(1 << 20),
}
"""What Open MPI is told, where the operator has told it nothing else."""

ON_LOOPBACK: Final[Mapping[str, str]] = {"OMPI_MCA_btl": "self,sm"}
"""The same, where no peer is beyond loopback."""

_LOST: Final = (
    "the other worker of this MPI world has ended, and nobody can take its place: restart both with one mpiexec"
)
_TOLERANCE: Final = "OMPI_MCA_mpi_ft_enable"
_log = logging.getLogger(__name__)


class MpiAgent(NativeAgent):
    """One of the two agents of an MPI world.

    Args:
        spec: as ``NativeAgent``; its one lane is MPI's thread. ``options`` of the transport: ``start_seconds`` (to wait
            for the other worker), ``end_seconds``.

    Raises:
        BackendUnavailableError: there is no world, it is not of two, or the other worker did not come.
    """

    def __init__(self, spec: AgentSpec) -> None:
        spec, on_loopback = take_loopback_option(spec)
        # MPI reads no other place that is ours.
        for key, value in {**SETTINGS, **(ON_LOOPBACK if on_loopback else {})}.items():
            os.environ.setdefault(key, value)
        self._mate = Mate()
        self._lost: str | None = None
        self._reporting = threading.Lock()
        try:
            super().__init__(spec, "mpi")
        except BaseException:
            self._mate.close()
            raise
        self._mate.meet()
        if os.environ.get(_TOLERANCE) != "1":
            _log.warning(
                "this MPI world tolerates no failure: when one worker ends, mpiexec ends the other; "
                "start them with mpiexec --with-ft ulfm"
            )

    def poll(self) -> list[Completion]:
        self._report_the_lost()
        return super().poll()

    def fence(self, peer: PeerId) -> Fence:
        self._report_the_lost()
        return super().fence(peer)

    @property
    def unusable(self) -> str | None:
        if self._mate.gone:
            self._report_loss()
        return self._lost

    def close(self) -> None:
        super().close()
        self._mate.close()

    def _report_the_lost(self) -> None:
        if self._mate.gone or any(peer.watch.gone for peer in self._peers.values()):
            self._report_loss()

    def _report_loss(self) -> None:
        with self._reporting:
            if self._lost is None:
                self._lost = _LOST
                _log.warning("%s", _LOST)
