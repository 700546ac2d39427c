"""Mooncake's library as our process wants it: over TCP, acknowledged, quiet, and on loopback where that is enough."""

import contextlib
import importlib.metadata
import ipaddress
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from kvferry_backends.tcp_table import LISTENING, TcpConnection, tcp_connections
from kvferry_plugins.errors import BackendUnavailableError

INSTALL: Final = "pip install mooncake-transfer-engine-non-cuda"
INSTALL_CUDA: Final = "pip install mooncake-transfer-engine"
SYSTEM_LIBRARIES: Final = "apt-get install -y libibverbs1 librdmacm1 libnuma1 libcurl4"

DISTRIBUTIONS: Final = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
"""Each of them brings the package ``mooncake``."""

OLDEST: Final = (0, 3, 13)
"""Its targets acknowledge a TCP write once it is in memory; before, it was complete when it had left the writer."""

_ENVIRONMENT: Final = {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR"}
"""What Mooncake reads nowhere else; what the operator set stands, here and below."""

_TUNING: Final = {
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # else each segment opens a connection, and thousands exhaust the ports
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "16384",  # its 1,024 is less than we post
    "MC_TRANSFER_TIMEOUT": "3600",  # it gives up what it then goes on writing; a peer that stops ends sooner anyway
}

_LOOPBACK_DEVICE = b"lo\0"
_LOG_LINE = re.compile(r"[IWEF]\d{4} |WARNING: Logging before InitGoogleLogging")


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A ``TransferEngine``, and where it listens."""

    engine: Any
    host: str
    rpc_port: int
    """Where peers ask what memory there is."""
    data_port: int
    """Where they send bytes."""

    @property
    def segment(self) -> str:
        """Its name among the peers."""
        return f"{self.host}:{self.rpc_port}"


def library_version() -> str:
    """Name and version, as compared in the handshake."""
    return f"mooncake {_version()}"


def load_mooncake(*, tuned: bool = True) -> Any:
    """Import Mooncake's module, with the environment set that it reads; ``tuned``: for what our agents do with it.

    Raises:
        BackendUnavailableError: it is not installed, too old, misses a system library, or is told not to acknowledge.
    """
    if os.environ.get("MC_TCP_PROTO") == "1":
        raise BackendUnavailableError("MC_TCP_PROTO='1' turns Mooncake's acknowledgements off; unset it")
    for name, value in (_ENVIRONMENT | (_TUNING if tuned else {})).items():
        os.environ.setdefault(name, value)
    try:
        import mooncake.engine
    except ImportError as error:
        fix = INSTALL if isinstance(error, ModuleNotFoundError) else SYSTEM_LIBRARIES
        raise BackendUnavailableError(f"Mooncake cannot be imported ({error}); install it with: {fix}") from error
    _require_version(_version())
    return mooncake.engine


def _version() -> str:
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


def _require_version(version: str) -> None:
    parts = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if parts and parts < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise BackendUnavailableError(
            f"Mooncake {version} says that a write is complete before it has arrived; "
            f"install {oldest} or later: {INSTALL} --upgrade"
        )


def start_engine(*, device: str, loopback_only: bool, tuned: bool = True) -> StartedEngine:
    """Start a ``TransferEngine`` over TCP with P2P handshake, at ports that it chooses itself.

    Args:
        device: where the memory is that it is to serve.
        loopback_only: whether nobody beyond loopback is to reach it. Mooncake listens on every network device and can
            not be told otherwise, so its two sockets are bound to the loopback device once they are there.
        tuned: as ``load_mooncake``.

    Raises:
        BackendUnavailableError: as ``load_mooncake``, or the engine does not start.
    """
    module = load_mooncake(tuned=tuned)
    if device != "cpu" and not module.SUPPORT_CUDA:
        raise BackendUnavailableError(f"this Mooncake is built without CUDA and cannot serve {device}: {INSTALL_CUDA}")
    host = "127.0.0.1" if loopback_only else _own_address()
    before = {listener.fd for listener in _listeners()}
    with _listening_to_its_log() as said:
        engine = module.TransferEngine()
        status = engine.initialize(host, "P2PHANDSHAKE", "tcp", "")
    if status != 0:
        raise BackendUnavailableError(_explain_start(status, said))
    rpc_port = int(engine.get_rpc_port())
    mine = [listener for listener in _listeners() if listener.fd not in before]
    data_ports = [listener.port for listener in mine if listener.port != rpc_port]
    if len(data_ports) != 1:
        raise BackendUnavailableError(f"Mooncake listens on {data_ports} beside {rpc_port}, not on one port for data")
    if loopback_only:
        _keep_to_loopback(mine)
    return StartedEngine(engine, host, rpc_port, data_ports[0])


def _explain_start(status: int, said: list[str]) -> str:
    errors = "; ".join(line.partition("] ")[2] for line in said if line.startswith("E")) or "no reason was given"
    ports = "its ports come from MC_MIN_RPC_PORT to MC_MAX_RPC_PORT, by default 15000 to 17000: free some or set others"
    advice = ports if "port" in errors.lower() else "run it with MC_LOG_LEVEL=INFO to see why"
    return f"Mooncake does not start (status {status}: {errors}); {advice}"


def _own_address() -> str:
    """The address that peers reach us at: what the operator says, else that of the device with the default route."""
    told = os.environ.get("MC_TCP_BIND_ADDRESS")
    if told:
        return told
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


# --- its listening sockets ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Listener:
    fd: int
    port: int


def _listeners() -> list[_Listener]:
    """Find this process's sockets that listen on every device."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), _borrowed(fd) as borrowed:
            is_listening = borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_listening and borrowed.family in (socket.AF_INET, socket.AF_INET6):
                address, port, *_ = borrowed.getsockname()
                if ipaddress.ip_address(address).is_unspecified:
                    found.append(_Listener(fd, port))
    return found


def _keep_to_loopback(listeners: list[_Listener]) -> None:
    """Have the kernel take no connection that does not come over loopback (Linux 5.7, or a privileged process)."""
    for listener in listeners:
        try:
            with _borrowed(listener.fd) as borrowed:
                borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK_DEVICE)
        except OSError as error:
            raise BackendUnavailableError(
                f"Mooncake listens on every network device at port {listener.port} and cannot be kept to loopback "
                f"({error}); configure `peers` if it may listen, or choose another backend"
            ) from error
    strangers = {each.remote for each in _connections_to(listeners) if not each.remote_is_loopback}
    if strangers:  # faster than we were
        raise BackendUnavailableError(f"{len(strangers)} connections came from beyond loopback at once; start it again")


def _connections_to(listeners: list[_Listener]) -> Iterator[TcpConnection]:
    ports = {listener.port for listener in listeners}
    return (each for each in tcp_connections() if each.state != LISTENING and each.local_port in ports)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """A socket object for a descriptor that stays its owner's. Raises OSError if it is none."""
    duplicate = os.dup(fd)
    try:
        borrowed = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with borrowed:
        yield borrowed


# --- its log -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _listening_to_its_log() -> Iterator[list[str]]:
    """Collect what Mooncake logs; a start that succeeds logs an error all the same.

    The log goes to the descriptor of stderr, which is turned aside for these milliseconds. What is not Mooncake's is
    written to it afterwards.
    """
    said: list[str] = []
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            aside.seek(0)
            lines = aside.read().decode(errors="replace").splitlines(keepends=True)
            said += [line.rstrip() for line in lines if _LOG_LINE.match(line)]
            os.write(2, "".join(line for line in lines if not _LOG_LINE.match(line)).encode())
