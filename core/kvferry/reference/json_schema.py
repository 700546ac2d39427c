"""The engine configuration as a JSON Schema (draft 2020-12), which editors complete and check from."""

import json
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from kvferry.config.capture_rules import Categories
from kvferry.config.schema import EMPTY_SECTIONS, EngineArgs
from kvferry.config.settings import Setting, settings
from kvferry.reference.markdown import prose

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
TITLE: Final = "kvferry's engine configuration"


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles that only repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never."""
        return False


def engine_schema() -> dict[str, Any]:
    """Make the schema. It accepts what ``parse_engine_args`` accepts, but for one thing: to JSON 32.0 is an integer."""
    schema: JsonSchemaValue = EngineArgs.model_json_schema(schema_generator=_Untitled)
    for setting in settings():
        _complete(_properties(schema, setting.owner), setting)
    for name in EMPTY_SECTIONS:
        section = schema["properties"][name]
        about = {key: section.pop(key) for key in ("description", "default") if key in section}
        schema["properties"][name] = {"anyOf": [section, {"type": "null"}], **about}
    for each in _objects(schema):
        each.pop("title", None)
    head = {"$schema": DIALECT, "title": TITLE}
    return {**head, **{key: value for key, value in schema.items() if key not in head}}


def engine_schema_text() -> str:
    """Write it as ``docs/reference/engine.schema.json``."""
    return json.dumps(engine_schema(), indent=2, ensure_ascii=False) + "\n"


def _properties(schema: JsonSchemaValue, owner: type[BaseModel]) -> dict[str, Any]:
    part = schema if owner is EngineArgs else schema["$defs"][owner.__name__]
    properties: dict[str, Any] = part["properties"]
    return properties


def _complete(properties: dict[str, Any], setting: Setting) -> None:
    """Say what a setting means, and offer the words that a text usually is."""
    entry = properties[setting.name]
    entry["description"] = prose(setting.meaning)
    if setting.default == {} and setting.type.base == "section":
        entry.pop("default", None)
    words = [word for marker in setting.type.markers if isinstance(marker, Categories) for word in marker.values]
    if words:
        entry["anyOf"] = [{"enum": words}, *entry["anyOf"]]


def _objects(schema: JsonSchemaValue) -> Iterator[dict[str, Any]]:
    yield schema
    yield from schema["$defs"].values()
