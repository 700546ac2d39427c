import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.config import load_engine_args, parse_engine_args
from kvferry_plugins.errors import ConfigError, ResolutionError


@pytest.fixture
def write(tmp_path):
    def write_config(text: str):
        path = tmp_path / "engine.yaml"
        path.write_text(text)
        return path

    return write_config


def test_an_empty_file_is_an_empty_configuration(write):
    assert load_engine_args(write("# nothing yet\n")).written() == {}


def test_what_was_written_is_kept_even_where_it_equals_the_default(write):
    args = load_engine_args(write("kv_cache_config: {tokens_per_block: 32}\n"))
    assert args.written() == {"kv_cache_config": {"tokens_per_block": 32}}


@pytest.mark.parametrize(
    "text", ["kv_cache_config: {}", "kv_cache_config:", "plugins:\npeers:", "plugins: {prefer: {}}"]
)
def test_an_empty_section_is_nothing_written(write, text):
    assert load_engine_args(write(text)).written() == {}


def test_the_file_is_remembered(write):
    path = write("")
    assert load_engine_args(path).origin == str(path)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: [", "no valid YAML"),
        ("- 1", "holds list"),
        ("just text", "holds str"),
        ("max_batch_size: 1\nmax_batch_size: 2", "written twice"),
        ("a: 2024-99-99", "cannot read"),
        ("\0", "no valid YAML"),
        ("a: &a [*a]", "holds itself"),
        ("? [1, 2]\n: 3", "no valid YAML"),
        ("a: " + "[" * 5000, "no valid YAML"),
        ("a: !!python/object:os.system x", "no valid YAML"),
        ("1: 2", "key 1 is no text"),
        ("kv_cache_config: {yes: 2}", "key kv_cache_config.True is no text"),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_that_is_no_configuration_says_why_and_which_file(write, text, word):
    path = write(text)
    with pytest.raises(ConfigError, match=word) as raised:
        load_engine_args(path)
    assert str(path) in str(raised.value)


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    for path, word in ((tmp_path, "directory"), (tmp_path / "missing.yaml", "No such file")):
        with pytest.raises(ConfigError, match=word) as raised:
            load_engine_args(path)
        assert str(path) in str(raised.value)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"latin\.yaml"):
        load_engine_args(path)


def test_a_merge_key_is_no_repetition(write):
    args = load_engine_args(write("<<: {model_loader: external}\nmax_batch_size: 2\n"))
    assert args.written() == {"model_loader": "external", "max_batch_size": 2}


@pytest.mark.parametrize(
    ("values", "setting", "hint"),
    [
        ({"cache_transceiver_config": {"runtime": "CPP"}}, "cache_transceiver_config.runtime", "'transceiver_runtime'"),
        ({"kv_cache_config": {"tokens_per_blok": 1}}, "kv_cache_config.tokens_per_blok", "'tokens_per_block'"),
        ({"tokens_per_block": 1}, "tokens_per_block", "'kv_cache_config.tokens_per_block'"),
        ({"kv_cache": {}}, "kv_cache", "'kv_cache_config'"),
        ({"plugins": {"disabled": []}}, "plugins.disabled", "'disable'"),
        ({"zzz": 1}, "zzz", "max_batch_size"),
        ({"peers": [{"endpoint": "tcp://h:1", "public_key": "a" * 40, "key": 1}]}, "peers.0.key", "'public_key'"),
        ({"cache_transceiver_config": {"transceiver_runtime": "python"}}, None, "'PYTHON'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_word_names_the_nearest_right_one(values, setting, hint):
    with pytest.raises(ConfigError) as raised:
        parse_engine_args(values, origin="engine.yaml")
    assert hint in str(raised.value)
    assert str(raised.value).startswith("engine.yaml: ")
    assert setting in (None, raised.value.setting)


def test_several_mistakes_are_reported_at_once():
    values = {"kv_cache_config": {"tokens_per_block": 0, "dtype": "float"}, "modell": 1}
    with pytest.raises(ResolutionError) as raised:
        parse_engine_args(values)
    settings = {error.setting for error in raised.value.blockers}
    assert settings == {"kv_cache_config.tokens_per_block", "kv_cache_config.dtype", "modell"}


def test_parsing_never_edits_what_it_is_given():
    values = {"kv_cache_config": {"max_attention_window": [1, 2]}, "plugins": {"enable": [" acme "]}}
    args = parse_engine_args(values)
    assert values == {"kv_cache_config": {"max_attention_window": [1, 2]}, "plugins": {"enable": [" acme "]}}
    assert args.plugins.enable == ("acme",)


keys = st.integers() | st.sampled_from(
    ["kv_cache_config", "cache_transceiver_config", "backend", "peers", "plugins", "prefer", "x"]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, max_size=4))
def test_whatever_is_written_parses_or_is_a_config_error(document):
    with contextlib.suppress(ConfigError):
        assert parse_engine_args(document).written() is not None
