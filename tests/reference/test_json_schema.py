"""The published schema and ``parse_engine_args`` are asked the same, on documents drawn from the schema itself."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.config import parse_engine_args
from kvferry.config.problems import known_keys
from kvferry.reference.json_schema import DIALECT, engine_schema
from kvferry_plugins.errors import ConfigError

SCHEMA = engine_schema()
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
CASES = Path(__file__).parents[3] / "shared" / "cases" / "resolution.yaml"


def matches_as_ecma_does(validator, pattern, instance, schema):
    """In JavaScript ``$`` is the end, in Python the line's end too."""
    if validator.is_type(instance, "string") and not re.search(re.sub(r"\$(?=\||$)", r"\\Z", pattern), instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": matches_as_ecma_does})
VALIDATOR = Validator(SCHEMA)


def parses(document) -> bool:
    try:
        parse_engine_args(document)
    except ConfigError:
        return False
    return True


# --- documents: mostly right, each part now and then replaced by something else ---------------------------------------

words = st.sampled_from(
    ["auto", "DEFAULT", "NIXL", "CPP", "V2", "cpu", "", " ", " acme ", "tcp://h:1", "tcp://[::1]:1", KEY]
)
fractions = st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer())
scalars = st.none() | st.booleans() | st.integers(-3, 70_000) | fractions | words
junk = scalars | st.lists(scalars, max_size=2) | st.dictionaries(words, scalars, max_size=2)


def mostly(strategy):
    return st.integers(0, 11).flatmap(lambda number: strategy if number else junk)


def drawn(part):
    """Documents for a part of the schema."""
    if "$ref" in part:
        return drawn(SCHEMA["$defs"][part["$ref"].rpartition("/")[2]])
    if "anyOf" in part:
        return st.one_of([drawn(each) for each in part["anyOf"]])
    if "enum" in part:
        return st.sampled_from(part["enum"])
    return OF_TYPE[part["type"]](part)


def drawn_object(part):
    if "properties" not in part:
        return st.dictionaries(words, drawn(part["additionalProperties"]), max_size=2)
    properties = {name: mostly(drawn(each)) for name, each in part["properties"].items()}
    required = {name: properties.pop(name) for name in part.get("required", ()) if name in properties}
    strangers = st.dictionaries(st.sampled_from(["unknown", "tokens_per_blok"]), scalars, max_size=1)
    known = st.fixed_dictionaries(required, optional=properties)
    return st.integers(0, 19).flatmap(
        lambda number: known if number else st.tuples(known, strangers).map(lambda pair: pair[0] | pair[1])
    )


OF_TYPE = {
    "null": lambda _: st.none(),
    "boolean": lambda _: st.booleans(),
    "integer": lambda _: st.integers(-1, 70_000) | st.integers(min_value=2**31),
    "number": lambda _: st.floats(-0.5, 1.5) | st.sampled_from([0, 1]),
    "string": lambda _: words,
    "array": lambda part: st.lists(mostly(drawn(part["items"])), max_size=2),
    "object": drawn_object,
}


documents = drawn(SCHEMA)


@given(documents)
@example({"kv_cache_config": None, "peers": None, "plugins": None, "cache_transceiver_config": None})
@example({"peers": [{"endpoint": "tcp://h:1\n", "public_key": KEY}]})
@example({"peers": [{"endpoint": "tcp://h:1", "public_key": f"{KEY}\n"}]})
@example({"plugins": {"prefer": {" ": "acme"}}})
@example({"kv_cache_config": {"max_attention_window": []}})
@example({"kv_cache_config": {"use_kv_cache_manager_v2": 1}})
@example({"kv_cache_config": {"free_gpu_memory_fraction": 1}})
def test_the_schema_accepts_what_the_parser_accepts_and_refuses_what_it_refuses(document):
    accepted = VALIDATOR.is_valid(document)
    assert accepted == parses(document), (document, [error.message for error in VALIDATOR.iter_errors(document)])


def test_the_draws_are_of_both_kinds():
    seen = set()

    @settings(max_examples=50)
    @given(documents)
    def draw(document):
        seen.add(VALIDATOR.is_valid(document))

    draw()
    assert seen == {True, False}


def test_to_json_a_whole_float_is_an_integer_and_that_is_all_that_differs():
    document = {"kv_cache_config": {"tokens_per_block": 32.0}}
    assert VALIDATOR.is_valid(document)
    assert not parses(document)


@pytest.mark.parametrize("case", yaml.safe_load(CASES.read_text()), ids=lambda case: case["id"])
def test_the_configurations_of_the_cases_are_judged_alike(case):
    assert VALIDATOR.is_valid(case["config"]) == parses(case["config"])


def test_it_is_a_schema_of_the_dialect_that_it_names():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == DIALECT


def test_every_setting_is_there_with_its_meaning():
    lacking = [key for key in known_keys() if not described(key)]
    assert lacking == []


def described(key):
    part = SCHEMA
    for name in key.split("."):
        part = inner(part)["properties"][name]
    return part["description"]


def inner(part):
    """The section that a part is, or that one of its alternatives or its items is."""
    if "properties" in part:
        return part
    if "$ref" in part:
        return SCHEMA["$defs"][part["$ref"].rpartition("/")[2]]
    found = [inner(each) for each in [*part.get("anyOf", ()), *([part["items"]] if "items" in part else [])]]
    return next((each for each in found if each), None)


def test_the_usual_backends_are_offered_and_others_allowed():
    assert VALIDATOR.is_valid({"cache_transceiver_config": {"backend": "THIRD"}})
    offered = SCHEMA["$defs"]["CacheTransceiverConfig"]["properties"]["backend"]["anyOf"][0]["enum"]
    assert "NIXL" in offered


def test_it_is_json_as_it_stands():
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
