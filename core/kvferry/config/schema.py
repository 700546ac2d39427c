"""The engine configuration as pydantic models: strict, frozen, and closed to unknown keys."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    Strict,
    StringConstraints,
    model_validator,
)

from kvferry.config.nested import without_empty_sections

Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Names = Annotated[tuple[Name, ...], Strict(False)]

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


class Section(BaseModel):
    """A mapping in the YAML whose keys are all known."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class KvCacheConfig(Section):
    """How much KV memory there is, how it is cut, and who manages it."""

    tokens_per_block: Positive = 32
    max_tokens: Positive | None = None
    """Capacity in tokens; null = take ``free_gpu_memory_fraction`` of what the device has free."""
    free_gpu_memory_fraction: float = Field(0.9, ge=0, le=1)
    enable_block_reuse: bool = True
    dtype: DType = "auto"
    max_attention_window: Annotated[tuple[Positive, ...], Strict(False), AfterValidator(_refuse_nothing)] | None = None
    """Sliding windows in tokens, repeated over the layers; null = as the checkpoint says."""
    use_kv_cache_manager_v2: Annotated[Literal[True, False, "auto"], BeforeValidator(_refuse_numbers)] = "auto"
    host_cache_size: Annotated[int, Field(ge=0)] | None = None
    """Bytes of host memory for blocks that leave the device, at least one block; manager V2 only."""
    disk_cache_size: Annotated[int, Field(ge=0)] | None = None
    """Bytes of files for blocks that leave host memory; needs ``disk_cache_path``."""
    disk_cache_path: str | None = None
    """An existing folder; each process makes one of its own in it, and removes those of dead ones."""


class CacheTransceiverConfig(Section):
    """Whether the KV cache travels, by what, and how long it may take."""

    backend: str | None = None
    """null = off; ``DEFAULT`` = let the environment or the default decide; else an active backend's name."""
    transceiver_runtime: Literal["auto", "CPP", "PYTHON"] | None = "auto"
    """null = ``CPP``, and is an explicit choice."""
    kv_transfer_timeout_ms: Positive | None = 60000
    """From POSTING to the end; null = only the peer's liveness bounds it."""
    kv_transfer_admission_timeout_ms: Positive = 60000
    """The admission lease: from TABLE, or the end of prefill, to POSTING."""
    kv_transfer_sender_future_timeout_ms: Positive | None = 1000
    kv_transfer_poll_interval_ms: Positive | None = 5000
    max_tokens_in_buffer: Positive | None = None
    """A multiple of ``kv_cache_config.tokens_per_block``."""
    enable_pipelined_transfer: bool = False
    kv_transfer_checksum: bool = False
    kv_transfer_shared_memory: bool = True
    """Under ``CPP``, write to a peer of the same host by copying to its pool, which lies in shared memory."""
    kv_transfer_threads: Positive | None = None
    """Threads that copy at once to such a pool; null = two, where there is more than one core."""


class PeerConfig(Section):
    """A worker beyond loopback that may connect."""

    endpoint: Annotated[str, StringConstraints(pattern=r"^tcp://[^\s/:]+:\d{1,5}$|^tcp://\[[0-9a-fA-F:.%]+\]:\d{1,5}$")]
    """``tcp://HOST:PORT``."""
    public_key: Annotated[str, StringConstraints(pattern=r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}$")]
    """CURVE, Z85: 40 characters."""


class PluginsConfig(Section):
    """Which plugins count in this deployment; see ``kvferry plugins``."""

    enable: Names = ()
    disable: Names = ()
    required: Names = ()
    prefer: dict[Name, Name] = Field(default_factory=dict)
    """Architecture, backend, runtime or manager → the plugin that wins every question about it."""


class EngineArgs(Section):
    """The whole engine configuration. ``parse_engine_args`` makes one and says in our words what is wrong."""

    cache_transceiver_config: CacheTransceiverConfig | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    model_loader: Literal["pytorch", "external"] = "pytorch"
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Positive = 1
    max_batch_size: Positive = 8
    max_seq_len: Positive | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peers: Annotated[tuple[PeerConfig, ...], Strict(False)] = ()
    plugins: PluginsConfig = PluginsConfig()

    _origin: str | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _an_empty_section_is_nothing_written(cls, values: Any) -> Any:
        """A YAML section whose keys are all commented out arrives as null."""
        if not isinstance(values, dict):
            return values
        empty = ("kv_cache_config", "peers", "plugins")
        return {key: value for key, value in values.items() if value is not None or key not in empty}

    @property
    def origin(self) -> str | None:
        """The file this was read from, or None."""
        return self._origin

    def written(self) -> dict[str, Any]:
        """What the user wrote, nested; an empty section is nothing written."""
        return without_empty_sections(self.model_dump(exclude_unset=True))
