"""``docs/reference/hooks.md``: every question that a plugin may answer, and the values that cross the border."""

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Final

from kvferry.reference.markdown import bullets, code, page, prose, table
from kvferry.reference.source import attributes, read_docstring, signature
from kvferry_plugins import PROJECT_NAME, spec
from kvferry_plugins.kv_cache import KVCacheManager
from kvferry_plugins.transceiver import KvCacheTransceiver, TransferAgent
from kvferry_plugins.types import (
    AgentSpec,
    Candidate,
    Decision,
    ManagerKind,
    ManagerSpec,
    Plan,
    Providers,
    RuntimeSupport,
    TransceiverRuntime,
    TransceiverSpec,
    TransferBackend,
    TransferEvent,
)

VALUES: Final[tuple[type, ...]] = (
    TransferBackend,
    RuntimeSupport,
    TransceiverRuntime,
    ManagerKind,
    AgentSpec,
    ManagerSpec,
    TransceiverSpec,
    Plan,
    Decision,
    Candidate,
    Providers,
    TransferEvent,
)
"""What hooks take and return, in the order in which they are met."""

MADE: Final[tuple[type, ...]] = (TransferAgent, KvCacheTransceiver, KVCacheManager)
"""What makers return."""

INTRODUCTION: Final = """\
A plugin is a module, or an instance, whose functions carry `hookimpl`, and which its distribution names under the
entry-point group `kvferry`:

```python
# acme_kvferry.py
from kvferry_plugins import hookimpl


@hookimpl
def preferred_transceiver_runtime(architecture: str):
    return "PYTHON" if architecture == "AcmeForCausalLM" else None
```

```toml
[project.entry-points.kvferry]
acme = "acme_kvferry"
```"""


def hooks_page() -> str:
    """Write the page."""
    first, *rest = read_docstring(spec.__doc__).paragraphs
    return page(
        "Hooks",
        "plugins/kvferry_plugins",
        first,
        *rest,
        INTRODUCTION,
        "## The questions",
        *map(_hook, hooks()),
        "## The values",
        "All are frozen, and come from `kvferry_plugins.types`.",
        *map(_value, VALUES),
        "## What makers return",
        *map(_made, MADE),
    )


def hooks() -> Iterator[FunctionType]:
    """Yield the hooks of the specification, in its order."""
    for value in vars(spec).values():
        if isinstance(value, FunctionType) and hasattr(value, f"{PROJECT_NAME}_spec"):
            yield value


def _hook(function: FunctionType) -> str:
    about = read_docstring(function.__doc__)
    parts = [f"### {function.__name__}", f"```text\n{signature(function)}\n```", *about.paragraphs]
    for title, named in about.sections.items():
        parts.append(f"{title}:\n\n" + bullets(f"`{name}`: {text}" if name else text for name, text in named.items()))
    return prose("\n\n".join(parts))


def _value(cls: type) -> str:
    rows = [
        (
            code(each.name),
            code(each.annotation),
            code(each.default) if each.default else "–",
            prose(each.meaning) or "–",
        )
        for each in attributes(cls)
    ]
    about = prose("\n\n".join(read_docstring(cls.__doc__).paragraphs))
    return f"### {cls.__name__}\n\n{about}\n\n{table(('field', 'type', 'default', 'meaning'), rows)}"


def _made(cls: type) -> str:
    rows = [(code(name), "yes" if needed else "–", prose(summary) or "–") for name, needed, summary in _methods(cls)]
    about = read_docstring(cls.__doc__)
    where = f"`{cls.__module__}.{cls.__name__}`."
    table_ = table(("method", "must be written", "what it does"), rows)
    return f"### {cls.__name__}\n\n{where} {prose(about.summary)}\n\n{table_}"


def _methods(cls: type) -> Iterator[tuple[str, bool, str]]:
    """Yield a class's public methods and properties: as called, whether abstract, and the first paragraph."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else value
        if name.startswith("_") or not isinstance(function, FunctionType):
            continue
        shown = name if isinstance(value, property) else signature(function)
        yield shown, name in getattr(cls, "__abstractmethods__", ()), read_docstring(inspect.getdoc(function)).summary
