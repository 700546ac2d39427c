"""The engine configuration as pydantic models: strict, frozen, and closed to unknown keys."""

from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    Strict,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from kvferry.config.capture_rules import Categories, NeverCaptured
from kvferry.config.nested import without_empty_sections

Positive = Annotated[int, Field(gt=0)]
_TEXT: Final = {"type": "string", "pattern": r"\S"}
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), WithJsonSchema(_TEXT)]
Names = Annotated[tuple[Name, ...], Strict(False)]

EMPTY_SECTIONS: Final = ("kv_cache_config", "peers", "plugins")
"""Top-level keys whose null is nothing written: a YAML section with every key commented out."""

DType = Literal[
    "auto",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "int8",
    "uint8",
]
"""``auto`` = as the checkpoint says; else torch's name without the module."""


def _refuse_numbers(value: Any) -> Any:
    """Keep 0 and 1 from passing as booleans: Python calls them equal."""
    if not isinstance(value, bool | str):
        raise ValueError("should be true, false or 'auto'")
    return value


def _refuse_nothing(value: tuple[int, ...]) -> tuple[int, ...]:
    if not value:
        raise ValueError("should hold at least one value (null = as the checkpoint says)")
    return value


_POSITIVE_LIST: Final = {"type": "array", "items": {"type": "integer", "exclusiveMinimum": 0}, "minItems": 1}


class Section(BaseModel):
    """A mapping in the YAML whose keys are all known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class KvCacheConfig(Section):
    """How much KV memory there is, how it is cut, and who manages it."""

    tokens_per_block: Positive = 32
    """Tokens of a block, the unit in which KV memory is given out, shared and moved; of the two sides one's divides the
    other's."""
    max_tokens: Positive | None = None
    """Capacity in tokens; null = take ``free_gpu_memory_fraction`` of what the device has free."""
    free_gpu_memory_fraction: float = Field(0.9, ge=0, le=1)
    """Share of the device's free memory that the pool takes where ``max_tokens`` is null; on a CPU at most 2 GiB."""
    enable_block_reuse: bool = True
    """Whether a prompt finds the blocks of an earlier one that begins alike."""
    dtype: DType = "auto"
    """What keys and values are kept in; ``auto`` = as the checkpoint says."""
    max_attention_window: (
        Annotated[tuple[Positive, ...], Strict(False), AfterValidator(_refuse_nothing), WithJsonSchema(_POSITIVE_LIST)]
        | None
    ) = None
    """Sliding windows in tokens, repeated over the layers; null = as the checkpoint says. V2 gives back what is behind
    a window, and an engine that would still read it is refused (transformers' reads all that the model's own windows
    hold); V1 keeps every token, and says that it has no effect."""
    use_kv_cache_manager_v2: Annotated[Literal[True, False, "auto"], BeforeValidator(_refuse_numbers)] = "auto"
    """true = manager V2 (layer groups, each with its own window and eviction, and tiers below the device), false = V1
    (one uniform pool), ``auto`` = what the model's plugin says, else V1."""
    host_cache_size: Annotated[int, Field(ge=0)] | None = None
    """Bytes of host memory for blocks that leave the device, at least one block; manager V2 only."""
    disk_cache_size: Annotated[int, Field(ge=0)] | None = None
    """Bytes of files for blocks that leave host memory, at least one block; manager V2 only; needs
    ``disk_cache_path``."""
    disk_cache_path: Annotated[str, NeverCaptured("path")] | None = None
    """An existing folder; each process makes one of its own in it, and removes those of dead ones. Needs
    ``disk_cache_size``."""


class CacheTransceiverConfig(Section):
    """Whether the KV cache travels, by what, and how long it may take."""

    backend: Annotated[str, Categories(("DEFAULT", "NIXL", "UCX", "MOONCAKE", "MPI"))] | None = None
    """What moves the bytes. null = off; ``DEFAULT`` = let the environment or the default decide; else an active
    backend's name."""
    transceiver_runtime: Literal["auto", "CPP", "PYTHON"] | None = "auto"
    """Which implementation runs; ``auto`` = what the model's plugin prefers, if it can be had; null = ``CPP``, and is
    an explicit choice."""
    kv_transfer_timeout_ms: Positive | None = 60000
    """From POSTING to the end; null = only the peer's liveness bounds it."""
    kv_transfer_admission_timeout_ms: Positive = 60000
    """The admission lease: from TABLE, or the end of prefill, to POSTING."""
    kv_transfer_sender_future_timeout_ms: Positive | None = 1000
    """Accepted because TensorRT-LLM's configurations hold it; nothing in kvferry waits for such a future."""
    kv_transfer_poll_interval_ms: Positive | None = 5000
    """How long a status that asks for ``at_least`` outcomes waits, at most; null = 5000."""
    max_tokens_in_buffer: Positive | None = None
    """A multiple of ``kv_cache_config.tokens_per_block``: under ``CPP`` the size of the buffer where short segments are
    gathered, and of the one where the peers' land; null = 32 MiB."""
    enable_pipelined_transfer: bool = False
    """Send a prefill's chunks while later ones are computed; needs a runtime that pipelines."""
    kv_transfer_checksum: bool = False
    """Compare a checksum of the contents at both sides; alike on both."""
    kv_transfer_shared_memory: bool = True
    """Under ``CPP``, write to a peer of the same host by copying to its pool, which lies in shared memory."""
    kv_transfer_threads: Positive | None = None
    """Threads that copy at once to such a pool; null = two, where there is more than one core."""


class PeerConfig(Section):
    """A worker beyond loopback that may connect."""

    endpoint: Annotated[
        str,
        StringConstraints(pattern=r"^tcp://[^\s/:]+:[0-9]{1,5}$|^tcp://\[[0-9a-fA-F:.%]+\]:[0-9]{1,5}$"),
        NeverCaptured("address"),
    ]
    """``tcp://HOST:PORT``: where the peer's control socket listens, exactly as its ``--control-bind`` says."""
    public_key: Annotated[
        str, StringConstraints(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$"), NeverCaptured("key")
    ]
    """The first line of its ``curve.key``: CURVE, Z85, 40 characters."""


class PluginsConfig(Section):
    """Which plugins count in this deployment; see ``kvferry plugins``."""

    enable: Names = ()
    """Plugins that are in although a lower layer disables them."""
    disable: Names = ()
    """Plugins that are out; their code is not imported."""
    required: Names = ()
    """Plugins without which nothing starts."""
    prefer: Annotated[
        dict[Name, Name],
        WithJsonSchema({"type": "object", "propertyNames": {"pattern": r"\S"}, "additionalProperties": _TEXT}),
    ] = Field(default_factory=dict)
    """Architecture, backend, runtime or manager → the plugin that wins every question about it."""


class EngineArgs(Section):
    """The whole engine configuration. ``parse_engine_args`` makes one and says in our words what is wrong."""

    cache_transceiver_config: CacheTransceiverConfig | None = None
    """Whether the KV cache travels, by what, and how long it may take; null, or without a ``backend`` = it does not."""
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    """How much KV memory there is, how it is cut, and who manages it."""
    model_loader: Literal["pytorch", "external"] = "pytorch"
    """Who loads the model; ``external`` = a host engine of its own, and no model plugin is asked."""
    tensor_parallel_size: Positive = 1
    """Ranks that share each layer's heads: it divides the KV heads, or is a multiple of them."""
    pipeline_parallel_size: Positive = 1
    """Stages that share the layers, at most as many as there are."""
    max_batch_size: Positive = 8
    """Requests at a time, each of which keeps a block of every state."""
    max_seq_len: Positive | None = None
    """Tokens of the longest request; null = what the model allows."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the pool lies and the model runs; ``auto`` = a GPU if there is one."""
    peers: Annotated[tuple[PeerConfig, ...], Strict(False)] = ()
    """Workers beyond loopback that may connect; empty = loopback only, and the same user."""
    plugins: PluginsConfig = PluginsConfig()
    """Which plugins count in this deployment."""

    _origin: str | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _an_empty_section_is_nothing_written(cls, values: Any) -> Any:
        """A YAML section whose keys are all commented out arrives as null."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in EMPTY_SECTIONS}

    @property
    def origin(self) -> str | None:
        """The file this was read from, or None."""
        return self._origin

    def written(self) -> dict[str, Any]:
        """What the user wrote, nested; an empty section is nothing written."""
        return without_empty_sections(self.model_dump(exclude_unset=True))
