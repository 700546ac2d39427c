"""``docs/reference/configuration.md``: every setting, what it may hold, what it means, and who else decides it."""

from typing import Final

from kvferry.config.settings import NO_DEFAULT, Setting, settings
from kvferry.doctor.variables import VARIABLES
from kvferry.reference.markdown import code, page, prose, table, yaml_value
from kvferry.resolution.defaults import NOT_FOR_MODELS
from kvferry.resolution.selectors import SELECTORS
from kvferry.resolution.vocabulary import ASK_ENVIRONMENT, BACKEND, MANAGER, RUNTIME, TRANSCEIVER

INTRODUCTION: Final = """\
An engine configuration is one YAML file, `--config` of every verb. Every key may be left out. Unknown keys and
wrong types are errors that name the file, the dotted key and the nearest right one, all at once. An empty section
(`kv_cache_config:` with every key commented out) is nothing written.

Editors complete and check it from the [JSON Schema](engine.schema.json), which `kvferry schema` prints:

```console
$ kvferry schema > engine.schema.json
```

```yaml
# engine.yaml
# yaml-language-server: $schema=engine.schema.json
cache_transceiver_config:
  backend: DEFAULT
kv_cache_config:
  tokens_per_block: 64
```

```console
$ kvferry explain --config engine.yaml
…
transceiver  CPP on NIXL, from runtime_cpp and nixl
…
```

A schema knows one setting at a time. What several must be together, and what a plugin has to bring, is checked when
the configuration is resolved ([how a decision is made](decisions.md)). To JSON `32.0` is an integer; to kvferry it
is not."""

_PLUGINS_ELSEWHERE: Final = "`kvferry.toml`, `KVFERRY_PLUGINS`, `KVFERRY_DISABLE_PLUGINS`, `-p`"

DECIDED_BY: Final = {
    BACKEND: f"under `{ASK_ENVIRONMENT}`: {', '.join(code(variable) for variable, _ in SELECTORS)}; "
    "declared by `transfer_backends`",
    RUNTIME: "under `auto`: `preferred_transceiver_runtime`; declared by `transceiver_runtimes`",
    MANAGER: "under `auto`: `model_defaults`; declared by `kv_cache_managers`",
    "peers": "nobody; our own key is in `KVFERRY_CURVE_KEY_FILE`, or in `curve.key`",
    "plugins.enable": _PLUGINS_ELSEWHERE,
    "plugins.disable": _PLUGINS_ELSEWHERE,
    "plugins.required": "`kvferry.toml`",
    "plugins.prefer": "`kvferry.toml`",
}
"""Setting → what decides it beside the file; for all others, ``model_defaults`` or nobody."""

_MODELS: Final = "`model_defaults`"
_NOBODY: Final = "nobody"


VARIABLES_TEXT: Final = """\
What kvferry reads beside the file. `kvferry doctor` names those that look like these and are none. Transports have
variables of their own ([transports](../transports.md)); where files lie follows the XDG variables
([deployment](../deployment.md))."""


def configuration_page() -> str:
    """Write the page."""
    found = list(settings())
    sections = [each for each in found if each.type.section is not None]
    top = [each for each in found if "." not in each.key]
    parts = [f"## At the top level\n\n{_settings(top)}"]
    parts += [_section(section, found) for section in sections]
    return page(
        "Configuration",
        "core/kvferry/config/schema.py",
        INTRODUCTION,
        *parts,
        f"## What models may not decide\n\n{_denied()}",
        f"## Environment variables\n\n{VARIABLES_TEXT}\n\n{_variables()}",
    )


def _section(section: Setting, found: list[Setting]) -> str:
    within = [each for each in found if each.key.rpartition(".")[0] == section.key]
    listed = " A list; each item holds these:" if section.type.item else ""
    return f"## {section.key}\n\n{prose(section.meaning)}{listed}\n\n{_settings(within)}"


def _settings(found: list[Setting]) -> str:
    rows = [
        (code(each.key), _type(each), _default(each), prose(each.meaning) or "–", _decided_by(each)) for each in found
    ]
    return table(("setting", "type and rule", "default", "meaning", "who else decides"), rows)


def _type(setting: Setting) -> str:
    return " or ".join(code(yaml_word) for yaml_word in words) if (words := _words(setting)) else str(setting.type)


def _words(setting: Setting) -> list[str]:
    """The words of a category, null too, so that each is set as code."""
    return str(setting.type).split(" or ") if setting.type.values else []


def _default(setting: Setting) -> str:
    return "must be written" if setting.default is NO_DEFAULT else yaml_value(setting.default)


def _decided_by(setting: Setting) -> str:
    if setting.key in DECIDED_BY:
        return DECIDED_BY[setting.key]
    if setting.type.base == "section":
        return _NOBODY if setting.key == TRANSCEIVER else "–"
    return _NOBODY if setting.key.partition(".")[0] in NOT_FOR_MODELS else _MODELS


def _denied() -> str:
    rows = [(code(key), why) for key, why in NOT_FOR_MODELS.items()]
    return (
        "A `model_defaults` that holds one of these keys is a `HookError`, as one that holds an unknown key or a value "
        f"of another type.\n\n{table(('key', 'why'), rows)}"
    )


def _variables() -> str:
    selectors = [
        (code(variable), f"`1`: `{ASK_ENVIRONMENT}` is `{backend}`, unless one above it is set")
        for variable, backend in SELECTORS
    ]
    return table(
        ("variable", "what it does"), [*((code(name), prose(text)) for name, text in VARIABLES.items()), *selectors]
    )
