import json
from typing import Annotated, Literal

import pytest
from pydantic import Field

from kvferry.config import EngineArgs, KvCacheConfig
from kvferry.config.capture_rules import Categories, NeverCaptured
from kvferry.config.problems import known_keys
from kvferry.config.schema import CacheTransceiverConfig
from kvferry.resolution.selectors import SELECTORS
from kvferry.resolution.vocabulary import ASK_ENVIRONMENT
from kvferry.telemetry.canonical import digest
from kvferry.telemetry.manifest import MANIFEST_FILE, committed_manifest, differences, generated_manifest
from kvferry.telemetry.rules import rules

ADVICE = "run `make generated`, and look at what it changes: it is what telemetry may hold"
BACKEND = "cache_transceiver_config.backend"


def test_the_manifest_the_schema_and_its_defaults_are_one():
    parted = list(differences(committed_manifest(), generated_manifest()))
    if parted:
        pytest.fail("\n".join([*parted, ADVICE]), pytrace=False)


def test_the_manifest_lists_every_setting_in_the_schemas_order():
    assert list(committed_manifest().rules) == list(known_keys())


def test_the_file_holds_its_own_digest():
    held = json.loads(MANIFEST_FILE.read_text())

    assert held.pop("digest") == digest(held)
    assert committed_manifest().text() == MANIFEST_FILE.read_text()


def test_a_new_field_another_type_another_default_and_other_words_are_each_named():
    class Cache(KvCacheConfig):
        tokens_per_block: str = "32"
        enable_block_reuse: bool = False

    class Changed(EngineArgs):
        kv_cache_config: Cache = Cache()
        model_loader: Literal["pytorch", "external", "later"] = "pytorch"
        retries: int = 3

    parted = list(differences(committed_manifest(), generated_manifest(Changed)))

    assert [line.partition(":")[0] for line in parted] == [
        "kv_cache_config.tokens_per_block",
        "kv_cache_config.enable_block_reuse",
        "model_loader",
        "retries",
    ]
    assert "'number' in the manifest, 'never: free text' now" in parted[0]
    assert "default True in the manifest, False now" in parted[1]
    assert "later" in parted[2]
    assert "only in the schema" in parted[3]


def test_a_field_that_is_gone_is_named():
    assert next(differences(committed_manifest(), generated_manifest(KvCacheConfig))) == (
        "cache_transceiver_config: only in the manifest"
    )


class Shapes(EngineArgs):
    text: str = ""
    words: Annotated[str, Categories(("a", "b"))] | None = None
    hidden: Annotated[int, NeverCaptured("serial number")] = 1
    hidden_when_null: Annotated[int, Field(gt=0), NeverCaptured("serial number")] | None = None
    several: int | str = 1
    mapping: dict[str, int] = Field(default_factory=dict)
    texts: tuple[str, ...] = ()
    integers: tuple[int, ...] | None = None
    nested: tuple[tuple[int, ...], ...] = ()
    answer: Literal["yes", None] = None
    unknown: object = None
    fraction: float | None = None


@pytest.mark.parametrize(
    ("field", "capture"),
    [
        ("text", "never: free text"),
        ("words", "category"),
        ("hidden", "never: serial number"),
        ("hidden_when_null", "never: serial number"),
        ("several", "never: other"),
        ("mapping", "never: mapping"),
        ("texts", "never: list of text"),
        ("integers", "numbers"),
        ("nested", "never: list of list"),
        ("answer", "category"),
        ("unknown", "never: other"),
        ("fraction", "number"),
    ],
)
def test_what_may_be_captured_follows_from_the_type(field, capture):
    assert {rule.key: rule.capture for rule in rules(Shapes)}[field] == capture


def test_the_backends_words_are_those_of_the_selectors():
    assert committed_manifest().rules[BACKEND].values == (ASK_ENVIRONMENT, *(backend for _, backend in SELECTORS))


def test_no_setting_whose_type_is_text_is_captured_but_the_backend():
    captured = [rule.key for rule in rules() if rule.type.startswith("text") and rule.is_captured]
    assert captured == [BACKEND]
    assert CacheTransceiverConfig.model_fields["backend"].annotation is not str
