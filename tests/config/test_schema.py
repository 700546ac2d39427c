import pytest

from kvferry.config import EngineArgs, parse_engine_args
from kvferry.config.nested import get_leaf
from kvferry.config.problems import known_keys
from kvferry_plugins.errors import ConfigError

DEFAULTS = {
    "cache_transceiver_config": None,
    "kv_cache_config.tokens_per_block": 32,
    "kv_cache_config.max_tokens": None,
    "kv_cache_config.free_gpu_memory_fraction": 0.9,
    "kv_cache_config.enable_block_reuse": True,
    "kv_cache_config.dtype": "auto",
    "kv_cache_config.max_attention_window": None,
    "kv_cache_config.use_kv_cache_manager_v2": "auto",
    "kv_cache_config.host_cache_size": None,
    "kv_cache_config.disk_cache_size": None,
    "kv_cache_config.disk_cache_path": None,
    "model_loader": "pytorch",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "max_batch_size": 8,
    "max_seq_len": None,
    "device": "auto",
    "peers": (),
}
TRANSCEIVER_DEFAULTS = {
    "backend": None,
    "transceiver_runtime": "auto",
    "kv_transfer_timeout_ms": 60000,
    "kv_transfer_admission_timeout_ms": 60000,
    "kv_transfer_sender_future_timeout_ms": 1000,
    "kv_transfer_poll_interval_ms": 5000,
    "max_tokens_in_buffer": None,
    "enable_pipelined_transfer": False,
    "kv_transfer_checksum": False,
    "kv_transfer_shared_memory": True,
    "kv_transfer_threads": None,
}
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def nested(setting: str, value: object) -> dict:
    for name in reversed(setting.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(("setting", "default"), DEFAULTS.items())
def test_a_setting_has_its_default(setting, default):
    assert get_leaf(EngineArgs().model_dump(), setting) == default


def test_a_transceiver_section_has_its_defaults():
    args = parse_engine_args({"cache_transceiver_config": {}})
    assert args.model_dump()["cache_transceiver_config"] == TRANSCEIVER_DEFAULTS


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cache_transceiver_config.transceiver_runtime", None),
        ("cache_transceiver_config.kv_transfer_timeout_ms", None),
        ("cache_transceiver_config.kv_transfer_poll_interval_ms", None),
        ("cache_transceiver_config.backend", "THIRD"),
        ("kv_cache_config.free_gpu_memory_fraction", 1),
        ("kv_cache_config.free_gpu_memory_fraction", 0.0),
        ("kv_cache_config.use_kv_cache_manager_v2", False),
        ("kv_cache_config.dtype", "float8_e4m3fn"),
        ("kv_cache_config.host_cache_size", 0),
        ("device", "cuda"),
    ],
)
def test_an_allowed_value_is_kept(setting, value):
    kept = get_leaf(parse_engine_args(nested(setting, value)).model_dump(), setting)
    assert kept == value
    assert isinstance(kept, bool) == isinstance(value, bool)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kv_cache_config.tokens_per_block", True),
        ("kv_cache_config.tokens_per_block", 32.0),
        ("kv_cache_config.tokens_per_block", "32"),
        ("kv_cache_config.tokens_per_block", -1),
        ("kv_cache_config.free_gpu_memory_fraction", 1.1),
        ("kv_cache_config.free_gpu_memory_fraction", float("nan")),
        ("kv_cache_config.free_gpu_memory_fraction", True),
        ("kv_cache_config.enable_block_reuse", 1),
        ("kv_cache_config.enable_block_reuse", "yes"),
        ("kv_cache_config.use_kv_cache_manager_v2", 1),
        ("kv_cache_config.use_kv_cache_manager_v2", 0),
        ("kv_cache_config.use_kv_cache_manager_v2", None),
        ("kv_cache_config.max_attention_window", []),
        ("kv_cache_config.max_attention_window", 512),
        ("kv_cache_config.max_attention_window", [0]),
        ("kv_cache_config.dtype", "half"),
        ("kv_cache_config.disk_cache_size", -1),
        ("cache_transceiver_config", []),
        ("cache_transceiver_config", False),
        ("cache_transceiver_config.kv_transfer_timeout_ms", 0),
        ("cache_transceiver_config.kv_transfer_admission_timeout_ms", None),
        ("cache_transceiver_config.backend", 1),
        ("cache_transceiver_config.max_tokens_in_buffer", 0),
        ("model_loader", "autodeploy"),
        ("device", "cuda:1"),
        ("tensor_parallel_size", 0),
        ("peers", {}),
        ("plugins.prefer", ["acme"]),
        ("plugins.enable", "acme"),
    ],
    ids=str,
)
def test_a_wrong_value_names_its_setting_and_itself(setting, value):
    with pytest.raises(ConfigError) as raised:
        parse_engine_args(nested(setting, value))
    assert raised.value.setting.startswith(setting)
    assert "but is" in str(raised.value)


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.1:5600", "tcp://host.example:1", "tcp://[::1]:5600"])
def test_a_peer_is_an_endpoint_with_a_key(endpoint):
    peer = parse_engine_args({"peers": [{"endpoint": endpoint, "public_key": KEY}]}).peers[0]
    assert (peer.endpoint, peer.public_key) == (endpoint, KEY)


@pytest.mark.parametrize(
    ("endpoint", "key", "word"),
    [("10.0.0.1:5600", KEY, "tcp://HOST:PORT"), ("tcp://h", KEY, "tcp://HOST:PORT"), ("tcp://h:1", KEY[1:], "Z85")],
)
def test_a_peer_that_cannot_be_reached_or_trusted_is_refused(endpoint, key, word):
    with pytest.raises(ConfigError, match=word):
        parse_engine_args({"peers": [{"endpoint": endpoint, "public_key": key}]})


def test_the_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        EngineArgs().max_batch_size = 3


def test_leaf_names_are_unique_so_that_a_table_needs_no_section():
    leaves = [key.rpartition(".")[2] for key in known_keys()]
    assert len(leaves) == len(set(leaves))
