"""The words and settings that the steps of the resolution share."""

from typing import Final

RUNTIMES: Final = ("CPP", "PYTHON")
"""All names that a model may prefer and a backend may declare."""

FALLBACK_RUNTIME: Final = "CPP"
"""What ``auto`` falls back to, and what null means; following upstream to another default is this one line."""

DEFAULT_BACKEND: Final = "NIXL"
"""What ``DEFAULT`` means where no variable decides."""

ASK_ENVIRONMENT: Final = "DEFAULT"
"""The value of ``backend`` that lets the environment or the default decide."""

MANAGER_NAMES: Final = {False: "V1", True: "V2"}
"""``use_kv_cache_manager_v2`` → the manager kind's name."""

TRANSCEIVER: Final = "cache_transceiver_config"
BACKEND: Final = "cache_transceiver_config.backend"
RUNTIME: Final = "cache_transceiver_config.transceiver_runtime"
TIMEOUT: Final = "cache_transceiver_config.kv_transfer_timeout_ms"
PIPELINING: Final = "cache_transceiver_config.enable_pipelined_transfer"
BUFFER: Final = "cache_transceiver_config.max_tokens_in_buffer"
MANAGER: Final = "kv_cache_config.use_kv_cache_manager_v2"
HOST_SIZE: Final = "kv_cache_config.host_cache_size"
DISK_SIZE: Final = "kv_cache_config.disk_cache_size"
DISK_PATH: Final = "kv_cache_config.disk_cache_path"
BLOCK_SIZE: Final = "kv_cache_config.tokens_per_block"
