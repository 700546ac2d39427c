"""The frozen values that cross the border between core and plugins."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from kvferry_plugins.layout import LayerKind

if TYPE_CHECKING:
    from kvferry_plugins.kv_cache import KVCacheManager
    from kvferry_plugins.transceiver import TransferAgent

RuntimeName = Literal["PYTHON", "CPP"]
"""Which implementation of the transceiver runs."""

Source = Literal["user", "environment", "model", "default", "fallback"]
"""Who decided: ``default`` = nobody asked; ``fallback`` = ``auto`` looked for a model's wish and took none."""


class Role(enum.StrEnum):
    """The side a worker serves."""

    CONTEXT = "context"
    GENERATION = "generation"


class ScheduleStyle(enum.StrEnum):
    """Which worker hears of a request first."""

    CONTEXT_FIRST = "context_first"
    GENERATION_FIRST = "generation_first"


class ProbeProblem(TypedDict):
    """Something that a probe found wrong."""

    what: str
    """Lower case, no full stop: ``agent.backends lacks UCX``."""
    fix: str
    """What to do: a command, a variable; empty where nobody knows."""


class ProbeReport(TypedDict):
    """What a backend's probe found out by really starting its library; it crosses to ``doctor`` as JSON.

    A probe may print, hang, raise or crash: each is a finding about its plugin. What it starts it need not end well.
    """

    usable: bool
    """Whether a transfer agent would start here."""
    library: str | None
    """The library that was loaded, with its version: ``ucx 1.22.0``; None where there is none."""
    transports: list[str]
    """What can move bytes, in the library's own names: ``tcp``, ``cma``, …"""
    problems: list[ProbeProblem]
    """With ``usable``: what will go worse than it need; without: why not."""
    memory: NotRequired[list[str]]
    """Kinds of memory that can be registered: ``host``, ``cuda``."""


# --- declarations: pure data, asked while resolving -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RuntimeSupport:
    """What a backend can do under one runtime."""

    needs_finite_timeout: bool = False
    """Whether ``kv_transfer_timeout_ms: null`` cannot be had under it."""
    managers: frozenset[str] | None = None
    """Names of the managers that it can drive; None = all."""


@dataclass(frozen=True, slots=True)
class TransferBackend:
    """A transport, as its plugin declares it."""

    name: str
    """Upper case: ``NIXL``, ``UCX``, …"""
    runtimes: Mapping[str, RuntimeSupport]
    """Runtime name → what is supported under it."""
    probe: str
    """``module:function``; ``doctor`` calls it in a process of its own, without arguments, for a ``ProbeReport``."""
    requires: tuple[str, ...] = ()
    """Top-level modules that must be installed, or ``distribution:NAME`` of a wheel that has none; looked up, never
    imported, to tell whether it is available."""
    install: str = ""
    """The command that installs what is missing."""
    deprecated: str | None = None
    """Why not to use it any more; said as a warning at creation."""
    baseline: str = ""
    """Module that ``python -m`` runs as the raw transport of ``kvferry bench transfer``: ``kvferry.bench.baseline``."""
    launcher: str = ""
    """``module:function`` for a transport whose workers must be started together, as one world: from the workers'
    command lines (a list of lists of str) to the one command line that starts them all. Empty = each on its own."""


@dataclass(frozen=True, slots=True)
class TransceiverRuntime:
    """An implementation of the transceiver, as its plugin declares it."""

    name: str
    """``PYTHON`` or ``CPP``: what ``transceiver_runtime`` and models' preferences name."""
    class_name: str
    """What the log calls it: ``Using KvCacheTransceiverV2``."""
    managers: frozenset[str] | None = None
    """Managers that it can drive; None = all."""
    pipelining: bool = False
    """Whether chunks of a prefill may leave while later ones are computed (``enable_pipelined_transfer``)."""
    schedule_styles: frozenset[ScheduleStyle] = frozenset({ScheduleStyle.CONTEXT_FIRST})
    """Which worker may hear of a request first."""
    inflight_cancellation: bool = False
    """Whether a transfer can be cancelled while bytes are on their way."""
    timing: bool = False
    """Whether its events say when each part began and ended."""
    shared_pools: bool = False
    """Whether it gains by pools that other processes of the host can map (``ManagerSpec.shared``)."""
    requires: tuple[str, ...] = ()
    """As a backend's."""
    install: str = ""
    """The command that installs what is missing."""


@dataclass(frozen=True, slots=True)
class ManagerKind:
    """A KV-cache manager, as its plugin declares it."""

    name: str
    """``V1``, ``V2``, or a plugin's own."""
    class_name: str
    """What people call it."""
    layer_groups: bool = False
    """Whether layers of different life cycles get pools of their own."""
    tiers: bool = False
    """Whether blocks that leave the device go to host memory and disk: ``host_cache_size``, ``disk_cache_size``."""
    layout: str = ""
    """``module:function``, from a ``ManagerSpec`` to the ``KvLayout`` that the manager would have, with pools of no
    blocks at address 0: pure, without memory and without torch. ``kvferry preflight`` compares it with the other
    side's before anything starts; empty = nobody knows until the manager is built."""
    requires: tuple[str, ...] = ()
    """As a backend's."""
    install: str = ""
    """The command that installs what is missing."""


# --- decisions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """A value that lost, or was not asked; ``reason`` says why."""

    value: Any
    """None where nobody was asked."""
    source: Source
    """Who wanted it."""
    by: str | None
    """The plugin or variable."""
    reason: str
    """Why it did not count."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How one setting got its value, written before anything was changed."""

    setting: str
    """Dotted key."""
    requested: Any
    """What was written, or the default."""
    value: Any
    """What the setting holds afterwards."""
    source: Source
    """Who decided: ``user``, ``environment``, ``model``, ``default``, ``fallback``."""
    by: str | None
    """The plugin, variable or file that decided."""
    reason: str
    """Why, in words."""
    candidates: tuple[Candidate, ...] = ()
    """What lost, or was not asked."""


@dataclass(frozen=True, slots=True)
class Providers:
    """The plugins that ``build`` will ask; None where there is nothing to build."""

    backend: str | None
    """Who makes the transfer agent."""
    runtime: str | None
    """Who makes the transceiver."""
    manager: str | None
    """Who makes the KV-cache manager."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``resolve`` returns: the effective configuration and every decision that led to it."""

    architecture: str | None
    """As the checkpoint names it; None = no model was given, or it names none."""
    execution_architecture: str | None
    """What the loader runs the checkpoint with."""
    decisions: tuple[Decision, ...]
    """In the order of the steps: backend, the settings that were written or defaulted, runtime, manager."""
    effective: Mapping[str, Any]
    """The whole engine configuration as plain values, immutable; nested sections are mappings."""
    manager: str
    """Name of the manager kind: ``V1``, ``V2``, …"""
    backend: str | None
    """The effective backend; None = no transceiver."""
    runtime: str | None
    """What the transceiver really runs on; None = no transceiver."""
    providers: Providers
    """The plugins that ``build`` will ask."""
    warnings: tuple[str, ...] = ()
    """What ``build`` logs as warnings, and ``explain`` prints."""
    log: tuple[str, ...] = ()
    """The lines that ``build`` logs once each, at INFO."""

    def decision(self, setting: str) -> Decision:
        """The decision about one dotted key. Raises KeyError."""
        for decision in self.decisions:
            if decision.setting == setting:
                return decision
        raise KeyError(setting)


# --- specifications: what a maker is handed ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleShape:
    """One thing that a layer keeps: ``key``, ``value``, ``latent``, ``conv``, …"""

    name: str
    heads: int
    """On this rank; what ranks share out."""
    width: int
    """Elements of one head's row: of one token, or of the whole state."""
    dtype: str | None = None
    """Its own, where it differs from the geometry's."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a sequence, on one rank."""

    roles: tuple[RoleShape, ...]
    kind: LayerKind = "attention"
    window: int | None = None
    head_start: int = 0
    """Global index of this rank's first head."""
    total_heads: int = 0
    """Heads over all ranks; 0 = those of ``roles``."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How an instance's ranks share a model. Within a data-parallel group ranks are numbered stage by stage."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Groups that hold the whole cache of their own requests; each is an instance with a rendezvous of its own."""

    @property
    def ranks(self) -> int:
        """Ranks that share one request."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Which rank of its instance a transceiver is, and where the instance meets."""

    rank: int
    """Within its data-parallel group: ``stage * tensor + tensor rank``."""
    topology: Topology
    rendezvous: str
    """Control endpoint of the group's rank 0, ``tcp://HOST:PORT``; rank 0 binds it."""
    data_rank: int = 0
    join_timeout_ms: int = 60_000
    """From the start until every rank must have joined."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The derived shape of a model's KV cache, on one rank."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    """torch's name without the module: ``float32``, ``bfloat16``, …"""
    windows: tuple[int | None, ...]
    """Sliding window in tokens a layer, or None for full attention; ``num_layers`` long."""
    layers: tuple[LayerShape, ...] = ()
    """Each layer's shape where they are not all attention with the heads above; ``num_layers`` long, or empty."""
    first_layer: int = 0
    """Global index of this rank's first layer."""
    head_start: int = 0
    """Global index of this rank's first KV head, for layers that ``layers`` does not describe."""
    total_heads: int = 0
    """KV heads over all ranks; 0 = ``kv_heads``."""

    def shape(self, position: int) -> LayerShape:
        """The shape of this rank's layer number ``position``."""
        if self.layers:
            return self.layers[position]
        roles = tuple(RoleShape(name, self.kv_heads, self.head_dim) for name in ("key", "value"))
        return LayerShape(
            roles, window=self.windows[position], head_start=self.head_start, total_heads=self.total_heads
        )

    def odd_layer(self) -> int | None:
        """Position of the first layer that keeps anything but keys and values of the heads above; None = all do."""
        usual = tuple(RoleShape(name, self.kv_heads, self.head_dim) for name in ("key", "value"))
        shapes = enumerate(map(self.shape, range(self.num_layers)))
        return next((at for at, each in shapes if (each.kind, each.roles) != ("attention", usual)), None)


@dataclass(frozen=True, slots=True)
class ManagerSpec:
    """What ``create_kv_cache_manager`` builds from."""

    kind: str
    """Which of the kinds that the plugin declares: its name."""
    geometry: ModelGeometry
    """Of this rank's part of the model."""
    tokens_per_block: int
    """Tokens of a block."""
    max_tokens: int | None
    """Capacity in tokens; None = take ``free_memory_fraction`` of what the device has free."""
    free_memory_fraction: float
    """Share of the device's free memory, where ``max_tokens`` is None."""
    enable_block_reuse: bool
    """Whether committed prefixes are found again."""
    device: str
    """``cpu`` or ``cuda:N``."""
    shared: bool = False
    """Put CPU pools where a peer of the same host can map them: a shared mapping of a file that cannot shrink."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The effective ``kv_cache_config``, for what a plugin's own manager needs beyond the above."""
    max_batch_size: int = 8
    """Requests at a time, each of which keeps a block of every state."""
    max_seq_len: int | None = None
    """Tokens of the longest request; None = not said."""


STAGING_BYTES = "staging_bytes"
"""Key of ``AgentSpec.options``: bytes of registered memory for gathering small segments (``max_tokens_in_buffer``)."""

MAP_PEERS = "map_peers"
"""Key of ``AgentSpec.options``: whether a peer's shared memory on this host is written to directly."""

COPY_THREADS = "copy_threads"
"""Key of ``AgentSpec.options``: threads that copy at once to such memory (``kv_transfer_threads``)."""

LOOPBACK_ONLY = "loopback_only"
"""Key of ``AgentSpec.options``: true where no peer beyond loopback is configured, so that nothing else may listen."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What ``create_transfer_agent`` builds from."""

    backend: str
    """Which of the backends that the plugin declares: its name."""
    name: str
    """Unique among the peers: instance and rank."""
    device: str
    """Where the pools are that it will register: ``cpu`` or ``cuda:N``."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What else the runtime asks for: the keys above, and whatever a backend of its own reads."""
    runtime: str = "PYTHON"
    """Who drives the agent: under ``CPP`` it must be a ``BlockTransferAgent``."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A configured peer beyond loopback."""

    endpoint: str
    """``tcp://HOST:PORT``."""
    public_key: str
    """Its CURVE key, Z85, 40 characters."""


@dataclass(frozen=True, slots=True)
class TransceiverSpec:
    """What ``create_transceiver`` builds from."""

    role: Role
    """The side that this worker serves."""
    runtime: str
    """Which of the runtimes that the plugin declares: its name."""
    backend: str
    """The effective backend, for the handshake and for messages."""
    manager: "KVCacheManager"
    """Whose blocks are moved; the transceiver does not shut it down."""
    create_agent: "Callable[[AgentSpec], TransferAgent]"
    """Asks the plan's backend provider, naming it in every error."""
    model: Mapping[str, str]
    """Identity of the model for the handshake: ``config`` and ``weights`` digests, ``architecture``."""
    config: Mapping[str, Any]
    """The effective ``cache_transceiver_config``."""
    plugins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Active model and backend plugins: name → distribution and version."""
    peers: tuple[Peer, ...] = ()
    """Who may connect from beyond loopback; empty = loopback only, and the same user."""
    bind: str = "tcp://127.0.0.1:0"
    """Where the control socket listens; port 0 = any free one."""
    device: str = "cpu"
    """Where the manager's pools are: ``cpu`` or ``cuda:N``."""
    on_event: "Callable[[TransferEvent], None] | None" = None
    """Told the end of every transfer, off the transfer loop."""
    ranks: RankSpec | None = None
    """None = the instance's only rank."""
    plugin_digests: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Of ``plugins``: name → a digest of the distribution's files; none of a plugin without files."""
    locked: bool = False
    """Whether a peer whose plugins differ is refused, not only named in a warning."""


# --- requests and their outcomes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DisaggregatedParams:
    """What travels from the context worker through the router to the generation worker, as in TensorRT-LLM.

    ``opaque_state`` is ours: instance, incarnation, token and sampler state; a router carries it unread.
    """

    request_type: Literal["context_only", "generation_only", "context_and_generation"]
    first_gen_tokens: tuple[int, ...] = ()
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: tuple[int, ...] = ()
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: ScheduleStyle = ScheduleStyle.CONTEXT_FIRST


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """One request, as an engine hands it to its transceiver."""

    request_id: int
    """This engine's own id, ≥ 0: the key of its blocks in the manager."""
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int = 0
    """Generation: leading tokens whose KV is here already; a multiple of the block size."""
    params: DisaggregatedParams | None = None
    """Generation: as received from the context worker."""
    attempt: int = 0
    """Grows when the same request is fetched again."""
    aux: bytes = b""
    """Context, with the last chunk: what the peer's engine is told with it (``TransferEvent.aux``), at most 64 KiB."""


Outcome = Literal["completed", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """The end of one transfer, for ``transfer_finished`` and for whoever prints a table."""

    request_id: int
    """As the engine of this side knows it."""
    role: Role
    """The side that tells it."""
    outcome: Outcome
    """``completed``, ``failed`` or ``cancelled``."""
    peer: str
    """Instance of the peer, or its endpoint if there was no handshake."""
    nbytes: int
    """Bytes that travelled (0 where the whole prefix was there)."""
    blocks: int
    """Blocks that they fill."""
    admission_seconds: float
    """From the request's start here to POSTING."""
    transfer_seconds: float
    """From POSTING to the end."""
    error: Exception | None = None
    """What ``request_and_receive_sync`` would raise."""
    aux: bytes = b""
    """Generation: what the context worker's engine sent along."""
    started: float = 0.0
    """When it began here, in seconds of ``time.monotonic``, which all processes of a host share."""
    posted: float = 0.0
    """When POSTING came, or was said."""
    ended: float = 0.0
    """When it was over."""
    arrivals: tuple[tuple[float, int], ...] = ()
    """Generation: when so many bytes in all were known to be here, chunk by chunk."""


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """Request ids that ended since the last call; each id once ever."""

    completed: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    cancelled: tuple[int, ...] = ()
    events: tuple[TransferEvent, ...] = ()
    """The same requests with cause and figures."""
