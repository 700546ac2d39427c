"""The conformance kit as a pytest plugin; imports nothing of kvferry until one of its fixtures is used.

The suites are subclassed (``kvferry_plugins.testing.conformance``); this brings fixtures for tests of one's own, a
marker for faults, and a section of the report that says which suites ran and how they came out.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from kvferry_plugins.testing import ScriptedAgent
    from kvferry_plugins.testing.managers import FakeManager

SUITES: Final = "kvferry_plugins.testing.conformance"
PROPERTY: Final = "kvferry_conformance"
FAULTS: Final = "kvferry_faults"

LEAK_SECONDS = 10.0
"""How long threads that are on their way out have for it."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", f"{FAULTS}(*script): faults of the first agent that kvferry_agents makes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note at each check of a suite which suite of which class it is."""
    for item in items:
        cls = getattr(item, "cls", None)
        suite = next((base for base in cls.__mro__ if base.__module__.startswith(SUITES)), None) if cls else None
        if cls is not None and suite is not None:
            item.user_properties.append((PROPERTY, f"{cls.__name__} ({suite.__name__})"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say of each suite how many checks ran, and how they came out."""
    found: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name in (value for key, value in getattr(report, "user_properties", ()) if key == PROPERTY):
                found.setdefault(name, Counter())[outcome] += 1
    if found:
        terminalreporter.section("kvferry conformance")
    for name, counts in sorted(found.items()):
        terminalreporter.write_line(f"{name}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}")


@pytest.fixture
def kvferry_agents(request: pytest.FixtureRequest) -> "Iterator[Callable[..., list[ScriptedAgent]]]":
    """Make scripted agents of one hub, ``kvferry_agents("writer", "target")``; they are closed at the end.

    The first of the first call follows the script of the marker ``kvferry_faults``. Keyword arguments are the agents'.
    """
    from kvferry_plugins.testing import ScriptedAgent, ScriptedHub

    marker, hub = request.node.get_closest_marker(FAULTS), ScriptedHub()
    scripts = [list(marker.args)] if marker is not None else []
    made: list[ScriptedAgent] = []

    def make(*names: str, **options: Any) -> list[ScriptedAgent]:
        new = [ScriptedAgent(name, scripts.pop() if scripts else (), hub=hub, **options) for name in names]
        made.extend(new)
        return new

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def kvferry_manager() -> "Iterator[FakeManager]":
    """A KV-cache manager of plain memory; at the end no block may be held."""
    from kvferry_plugins.testing.managers import FakeManager

    manager = FakeManager()
    yield manager
    manager.shutdown()
    assert not manager.held, f"blocks are still held at the end of the test, block: holds = {manager.held}"


@pytest.fixture
def kvferry_no_leaks() -> Iterator[None]:
    """Fail if the test leaves a thread or a descriptor behind; name it first among the test's fixtures."""
    from kvferry_plugins.testing.conformance.process_state import left_behind, process_state

    before = process_state()
    yield
    left = left_behind(before, LEAK_SECONDS)
    assert not left, f"the test left behind: {'; '.join(left)}"
