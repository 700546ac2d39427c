"""``docs/telemetry.md``: what may be captured of each setting, and how a plugin gets it."""

import json
from typing import Final

from kvferry.checkpoint import ModelSpec
from kvferry.config.settings import NO_DEFAULT
from kvferry.dispatcher import resolve
from kvferry.reference.markdown import bullets, code, page, table, yaml_value
from kvferry.telemetry.capture import BY, ITEMS_LIMIT, OTHER, SIZE_LIMIT, Capture, capture
from kvferry.telemetry.manifest import CAPTURE_VERSION, MANIFEST_VERSION, POLICY_VERSION, generated_manifest
from kvferry.telemetry.rules import Rule
from kvferry.testing import isolated_registry

SHOWN: Final = (
    "cache_transceiver_config.backend",
    "cache_transceiver_config.transceiver_runtime",
    "kv_cache_config.use_kv_cache_manager_v2",
)
"""The fields of the example, of the many that a capture has."""

INTRODUCTION: Final = """\
**Nothing leaves the process.** kvferry has no code that sends anything, and no setting that would turn it on. What
may be told of a plan is decided by a committed file, `core/kvferry/telemetry/manifest.json`, and
`kvferry.telemetry.capture` takes no more than that. Whoever wants to know what a fleet resolves to writes a plugin
that sends it; uninstall that plugin, or disable it, and nothing is sent."""

PLUGIN: Final = """\
## A plugin that keeps what it is told

`plan_resolved` is told each plan that a worker is built from. It is an observer: it runs on a thread of its own,
and what it raises changes nothing.

```python
# acme_telemetry.py
from pathlib import Path

from kvferry.telemetry import capture
from kvferry_plugins import hookimpl


@hookimpl
def plan_resolved(plan):
    with Path("captured.jsonl").open("a") as file:
        print(capture(plan).text, file=file)  # yours would send it
```

Here it is, without a worker:

```python
import json
from pathlib import Path

import acme_telemetry
from kvferry.dispatcher import resolve
from kvferry.testing import isolated_registry

registry = isolated_registry(acme_telemetry, builtin_models=True)
config = {"cache_transceiver_config": {"backend": "NIXL"}}
plan = resolve(config, model="LlamaForCausalLM", registry=registry, environ={})
registry.plan_resolved(plan)  # `build` says it, once
registry.drain_observers(timeout=60)

told = json.loads(Path("captured.jsonl").read_text())["fields"]["cache_transceiver_config.transceiver_runtime"]
assert told == {"requested": "auto", "resolved": "PYTHON", "source": "model", "by": "built-in plugin"}
```"""

FIELDS: Final = """\
## Every setting, and what may be captured of it

`kvferry schema --telemetry` prints this as JSON."""


NEVER_TEXT: Final = """\
Free text, paths, addresses, keys, mappings, lists of text, names of plugins and of models are never captured. A
field of such a type can only be in the manifest as `never`; a text becomes a category only where the schema lists
its words."""

HELD_TEXT: Final = """\
Of each field a capture holds `requested` (what was written, or the default) *and* `resolved` (what holds in the
end), `source`, and, where somebody decided, `by` as a kind: {who}. Settings of a section that is not there are not
there. What is left out is counted in `excluded` by what it is, and never quoted."""

LIMIT_TEXT: Final = """\
`Capture.text` is canonical JSON (sorted keys, ASCII) of at most {limit:,} bytes; beyond that the largest fields are
left out, and counted as `size`. `Capture.digest` is its SHA-256: workers that resolve alike have one."""

CHANGES_TEXT: Final = """\
## When a setting is added or changed

`make generated` writes the manifest and this page from the schema. A test fails, naming the field, while schema,
defaults and manifest part; so the change to what may be captured is in the diff, and somebody looks at it. To keep
a field out whatever its type, mark it `NeverCaptured(…)`; to capture a text by its known words, `Categories((…))`:
both are in `kvferry.config.capture_rules`.

Versions: manifest {manifest} (its own form), capture {capture} (the form of what is captured), policy {policy}
(which kinds may be captured at all). A capture names its versions and the digest of the manifest that allowed it."""


def telemetry_page() -> str:
    """Write the page."""
    manifest = generated_manifest()
    return page(
        "Telemetry",
        "core/kvferry/config/schema.py",
        INTRODUCTION,
        _what(),
        PLUGIN,
        _example(),
        FIELDS,
        table(("setting", "type", "default", "captured as", "as it is"), map(_row, manifest.rules.values())),
        _changes(),
    )


def _what() -> str:
    kinds = [
        f"**categories**: words that the schema or an allow-list names; any other word is {code(OTHER)}",
        "**booleans**, and **numbers** that are finite and at most 2⁵³",
        f"**lists of numbers**, of at most {ITEMS_LIMIT} items",
    ]
    who = ", ".join(map(code, BY))
    return "\n\n".join(
        [
            "## What a capture is",
            bullets(kinds),
            NEVER_TEXT,
            HELD_TEXT.format(who=who),
            LIMIT_TEXT.format(limit=SIZE_LIMIT),
        ]
    )


def _example() -> str:
    """Show a real capture, cut to three fields."""
    plan = resolve(
        {"cache_transceiver_config": {"backend": "NIXL"}, "kv_cache_config": {"use_kv_cache_manager_v2": True}},
        model=ModelSpec("AcmeForCausalLM"),
        registry=isolated_registry(),
        environ={},
    )
    whole = capture(plan, manifest=generated_manifest())
    cut = Capture({key: whole.fields[key] for key in SHOWN}, whole.excluded, whole.manifest).plain()
    left_out = len(whole.fields) - len(SHOWN)
    text = json.dumps(cut, indent=2)
    return f"A capture of another plan, of which {left_out} fields are left out here:\n\n```json\n{text}\n```"


def _row(rule: Rule) -> tuple[str, ...]:
    default = "–" if rule.default is NO_DEFAULT else yaml_value(rule.default)
    return code(rule.key), rule.type, default, rule.capture, ", ".join(map(yaml_value, rule.values)) or "–"


def _changes() -> str:
    versions = {"manifest": MANIFEST_VERSION, "capture": CAPTURE_VERSION, "policy": POLICY_VERSION}
    return CHANGES_TEXT.format(**versions)
